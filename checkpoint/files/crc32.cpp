#include "checkpoint/files/crc32.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megashard {
namespace {

// Arithmetic of polynomials over GF(2) modulo the CRC's polynomial. In a 32-bit word bit 31 is the constant term, as in
// the checksum.
constexpr uint32_t kPolynomial = 0xedb88320U;

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (a & 1 ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t term = 1U << 31; term != 0; term >>= 1) {
    if (a & term) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr uint32_t power_of_x(int exponent) {
  uint32_t power = 1U << 31;
  for (int i = 0; i < exponent; ++i) power = times_x(power);
  return power;
}

/// Factors by which appending 1, 2, 4, ... bytes multiplies a checksum.
constexpr std::array<uint32_t, 63> make_powers() {
  std::array<uint32_t, 63> powers{};
  powers[0] = power_of_x(8);
  for (size_t i = 1; i < powers.size(); ++i) powers[i] = multiply(powers[i - 1], powers[i - 1]);
  return powers;
}

constexpr auto kOverBytes = make_powers();

constexpr int kSlices = 16;  // bytes per step, with one table each
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (int slice = 1; slice < kSlices; ++slice) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const auto previous = tables[slice - 1][byte];
      tables[slice][byte] = previous >> 8 ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t fold(uint32_t word, int slice) {
  return kTables[slice][word & 0xff] ^ kTables[slice - 1][word >> 8 & 0xff] ^ kTables[slice - 2][word >> 16 & 0xff] ^
         kTables[slice - 3][word >> 24];
}

/// CRC without the inversions before and after, which the caller does.
uint32_t raw_by_tables(uint32_t crc, const unsigned char* at, int64_t bytes) {
  for (; bytes >= kSlices; bytes -= kSlices, at += kSlices) {
    uint32_t words[4];  // little-endian, as on all platforms of LibTorch supported here
    std::memcpy(words, at, sizeof words);
    crc = fold(words[0] ^ crc, 15) ^ fold(words[1], 11) ^ fold(words[2], 7) ^ fold(words[3], 3);
  }
  for (; bytes > 0; --bytes, ++at) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 0xff];
  return crc;
}

#if defined(__x86_64__)

constexpr int64_t kLane = 16;          // bytes of a register
constexpr int64_t kBlock = 4 * kLane;  // four registers at once hide the multiplication's latency

/// Factors that move a register over `bytes` more of the message: its two halves are multiplied by these powers of x.
/// The shift corrects the product of reversed words, which is one bit low.
struct Distance {
  int64_t low_half;
  int64_t high_half;
};
constexpr Distance over(int64_t bytes) {
  const int bits = static_cast<int>(8 * bytes);
  return {static_cast<int64_t>(power_of_x(bits + 32)) << 1, static_cast<int64_t>(power_of_x(bits - 32)) << 1};
}
constexpr Distance kOverBlock = over(kBlock);
constexpr Distance kOverLane = over(kLane);

[[gnu::target("pclmul,sse4.1")]] inline __m128i load_lane(const unsigned char* at) {
  return _mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(at)));
}

[[gnu::target("pclmul,sse4.1")]] inline __m128i move_onto(__m128i lane, __m128i distance, __m128i next) {
  return _mm_xor_si128(
      _mm_xor_si128(_mm_clmulepi64_si128(lane, distance, 0x00), _mm_clmulepi64_si128(lane, distance, 0x11)), next);
}

/// Folds the message into one register with the same remainder, then finishes with the tables (Gopal et al., "Fast CRC
/// computation for generic polynomials using PCLMULQDQ").
[[gnu::target("pclmul,sse4.1")]] uint32_t raw_by_multiplication(uint32_t crc, const unsigned char* at, int64_t bytes) {
  if (bytes < kBlock) return raw_by_tables(crc, at, bytes);
  const __m128i over_block = _mm_set_epi64x(kOverBlock.high_half, kOverBlock.low_half);
  const __m128i over_lane = _mm_set_epi64x(kOverLane.high_half, kOverLane.low_half);
  __m128i lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = load_lane(at + i * kLane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (at += kBlock, bytes -= kBlock; bytes >= kBlock; at += kBlock, bytes -= kBlock) {
    for (int i = 0; i < 4; ++i) lanes[i] = move_onto(lanes[i], over_block, load_lane(at + i * kLane));
  }
  __m128i lane = lanes[0];
  for (int i = 1; i < 4; ++i) lane = move_onto(lane, over_lane, lanes[i]);
  for (; bytes >= kLane; at += kLane, bytes -= kLane) lane = move_onto(lane, over_lane, load_lane(at));
  unsigned char rest[kLane];
  std::memcpy(rest, &lane, sizeof rest);
  return raw_by_tables(raw_by_tables(0, rest, kLane), at, bytes);
}

const auto raw_crc32 =
    __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1") ? raw_by_multiplication : raw_by_tables;

#else

constexpr auto raw_crc32 = raw_by_tables;

#endif

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, int64_t bytes) {
  return ~raw_crc32(~crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t crc32_by_tables(uint32_t crc, const void* data, int64_t bytes) {
  return ~raw_by_tables(~crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t copy_with_crc32(void* to, const void* from, int64_t bytes, uint32_t crc) {
  constexpr int64_t kAtOnce = 32 << 10;  // fits the L1 cache
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  while (bytes > 0) {
    const auto part = std::min(bytes, kAtOnce);
    std::memcpy(target, source, static_cast<size_t>(part));
    crc = ~raw_crc32(~crc, target, part);
    target += part;
    source += part;
    bytes -= part;
  }
  return crc;
}

uint32_t crc32_combine(uint32_t first, uint32_t second, int64_t second_bytes) {
  for (size_t i = 0; second_bytes > 0; second_bytes >>= 1, ++i) {
    if (second_bytes & 1) first = multiply(kOverBytes[i], first);
  }
  return first ^ second;
}

}  // namespace megashard
