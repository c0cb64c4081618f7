#pragma once

#include <bit>
#include <cstdint>

/// Floating formats as bits, and conversions between them. Host and device (nvcc) compile the same functions, so that a
/// kernel and its CPU twin round identically, to nearest even. NaN stays NaN, with the same bits on both except for
/// fp64.
namespace megashard {

constexpr uint32_t kSignBit = 0x80000000U;
constexpr uint32_t kInfinityBits = 0x7f800000U;

struct BFloat16Bits {
  uint16_t bits;
};
struct HalfBits {
  uint16_t bits;
};
/// float8_e4m3fn: no Inf; 0x7f and 0xff are NaN; the maximum is 448.
struct Float8Bits {
  uint8_t bits;
};
constexpr float kFloat8Largest = 448.0F;

/// Bits of a non-negative finite value (given as float bits) in a format with `mantissa` bits and smallest normal
/// number 2^lowest. Values too large for the format give larger bits.
constexpr uint32_t rounded_magnitude(uint32_t magnitude, int mantissa, int lowest) {
  if (magnitude < static_cast<uint32_t>(127 + lowest) << 23) {
    // Subnormal in that format: rounded by adding a power of two whose last bit has the weight of the format's last
    // bit.
    const auto large = static_cast<uint32_t>(127 + lowest - mantissa + 23) << 23;
    return std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(large)) - large;
  }
  const int dropped = 23 - mantissa;
  const uint32_t odd = (magnitude >> dropped) & 1U;
  const uint32_t rebased = magnitude - (static_cast<uint32_t>(126 + lowest) << 23);
  return (rebased + odd + (1U << (dropped - 1)) - 1U) >> dropped;
}

/// The float of such bits, unless they encode Inf or NaN.
constexpr float widened_magnitude(uint32_t magnitude, int mantissa, int lowest) {
  if (magnitude >> mantissa == 0) {
    return static_cast<float>(magnitude) * std::bit_cast<float>(static_cast<uint32_t>(127 + lowest - mantissa) << 23);
  }
  return std::bit_cast<float>((magnitude << (23 - mantissa)) + (static_cast<uint32_t>(126 + lowest) << 23));
}

constexpr float with_sign(float magnitude, bool negative) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (negative ? kSignBit : 0U));
}

constexpr float to_float(float value) { return value; }
constexpr float to_float(double value) { return static_cast<float>(value); }
constexpr float to_float(BFloat16Bits value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
constexpr float to_float(HalfBits value) {
  const uint32_t magnitude = value.bits & 0x7fffU;
  const uint32_t quiet = magnitude > 0x7c00U ? 0x400000U : 0U;
  const float number = magnitude < 0x7c00U ? widened_magnitude(magnitude, 10, -14)
                                           : std::bit_cast<float>(kInfinityBits | quiet | (magnitude & 0x3ffU) << 13);
  return with_sign(number, (value.bits & 0x8000U) != 0);
}
constexpr float to_float(Float8Bits value) {
  const uint32_t magnitude = value.bits & 0x7fU;
  const float number = magnitude < 0x7fU ? widened_magnitude(magnitude, 3, -6) : std::bit_cast<float>(0x7ff00000U);
  return with_sign(number, (value.bits & 0x80U) != 0);
}

constexpr void round_to(float& to, float value) { to = value; }
constexpr void round_to(double& to, float value) { to = value; }
constexpr void round_to(BFloat16Bits& to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & ~kSignBit) > kInfinityBits;
  to.bits = static_cast<uint16_t>(nan ? 0x7fc0U : (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
constexpr void round_to(HalfBits& to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & ~kSignBit;
  uint32_t rounded = 0x7e00U;  // NaN
  if (magnitude <= kInfinityBits) {
    constexpr uint32_t kTooLarge = 0x477ff000U;  // 65520: midpoint of 65504 and the next step
    rounded = magnitude < kTooLarge ? rounded_magnitude(magnitude, 10, -14) : 0x7c00U;
  }
  to.bits = static_cast<uint16_t>(rounded | (bits & kSignBit) >> 16);
}
/// NaN above 464, the midpoint of 448 and the next step. LibTorch's newer versions give 448 there.
constexpr void round_to(Float8Bits& to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & ~kSignBit;
  constexpr uint32_t kTooLarge = 0x43f00000U;  // 480
  const uint32_t rounded = magnitude < kTooLarge ? rounded_magnitude(magnitude, 3, -6) : 0x7fU;
  to.bits = static_cast<uint8_t>(rounded | (bits & kSignBit) >> 24);
}

/// dtypes that kernels convert.
enum class FloatFormat : uint8_t { kFloat, kDouble, kBFloat16, kHalf };

constexpr int64_t size_of(FloatFormat format) {
  switch (format) {
    case FloatFormat::kFloat:
      return 4;
    case FloatFormat::kDouble:
      return 8;
    case FloatFormat::kBFloat16:
    case FloatFormat::kHalf:
      break;
  }
  return 2;
}

/// Calls function(zero of the format's type). Host only: it selects the kernel.
template <class Function>
void with_format(FloatFormat format, Function function) {
  switch (format) {
    case FloatFormat::kFloat:
      return function(float{});
    case FloatFormat::kDouble:
      return function(double{});
    case FloatFormat::kBFloat16:
      return function(BFloat16Bits{});
    case FloatFormat::kHalf:
      return function(HalfBits{});
  }
}

}  // namespace megashard
