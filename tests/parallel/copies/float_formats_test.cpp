#include "parallel/copies/float_formats.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isnan.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace megashard {
namespace {

/// Floats of all signs, exponents and leading digits, at and around the 16-bit values, including all ties of all
/// formats. `largest`: the largest of them, without NaN.
std::vector<float> all_kinds_of_floats(float largest) {
  std::vector<float> floats;
  for (uint32_t high = 0; high < 0x10000U; ++high) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x0fffU, 0x1000U, 0x1001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU})
      floats.push_back(std::bit_cast<float>(high << 16 | low));
  }
  std::erase_if(floats, [largest](float value) { return std::abs(value) > largest; });
  return floats;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// Larger values become NaN, in newer versions of LibTorch the maximum. Scaled values are never larger.
constexpr float kFloat8Midpoint = 464.0F;

template <class Ours, class Theirs>
void expect_same_rounding(float largest = kInfinity) {
  for (const float value : all_kinds_of_floats(largest)) {
    Ours ours{};
    round_to(ours, value);
    ASSERT_EQ(ours.bits, Theirs(value).x) << std::hex << std::bit_cast<uint32_t>(value);
  }
}

TEST(FloatFormats, RoundAsTheScalarsOfLibTorchDo) {
  expect_same_rounding<BFloat16Bits, c10::BFloat16>();
  expect_same_rounding<HalfBits, c10::Half>();
  expect_same_rounding<Float8Bits, c10::Float8_e4m3fn>(kFloat8Midpoint);
}

template <class Ours, class Theirs>
void expect_same_widening(uint32_t count) {
  for (uint32_t bits = 0; bits < count; ++bits) {
    Ours ours{};
    ours.bits = static_cast<decltype(ours.bits)>(bits);
    const float expected = Theirs(ours.bits, Theirs::from_bits());
    ASSERT_EQ(std::bit_cast<uint32_t>(to_float(ours)), std::bit_cast<uint32_t>(expected)) << std::hex << bits;
  }
}

TEST(FloatFormats, WidenAsTheScalarsOfLibTorchDo) {
  expect_same_widening<BFloat16Bits, c10::BFloat16>(0x10000);
  expect_same_widening<HalfBits, c10::Half>(0x10000);
  expect_same_widening<Float8Bits, c10::Float8_e4m3fn>(0x100);
}

/// LibTorch's vectorised tensor casts agree except for the bits of NaN.
template <class Ours>
void expect_same_cast(at::ScalarType dtype, float largest = kInfinity) {
  std::vector<float> floats = all_kinds_of_floats(largest);
  const auto count = static_cast<int64_t>(floats.size());
  const at::Tensor source = at::from_blob(floats.data(), {count}, at::kFloat);
  const at::Tensor theirs = source.to(dtype).to(at::kFloat);
  std::vector<float> ours(floats.size());
  for (size_t i = 0; i < floats.size(); ++i) {
    Ours narrow{};
    round_to(narrow, floats[i]);
    ours[i] = to_float(narrow);
  }
  const at::Tensor mine = at::from_blob(ours.data(), {count}, at::kFloat);
  EXPECT_TRUE(at::equal(at::isnan(mine), at::isnan(theirs))) << dtype;
  EXPECT_TRUE(at::equal(mine.nan_to_num(), theirs.nan_to_num())) << dtype;
}

TEST(FloatFormats, RoundAsTensorCastsDo) {
  expect_same_cast<BFloat16Bits>(at::kBFloat16);
  expect_same_cast<HalfBits>(at::kHalf);
  expect_same_cast<Float8Bits>(at::kFloat8_e4m3fn, kFloat8Midpoint);
}

}  // namespace
}  // namespace megashard
