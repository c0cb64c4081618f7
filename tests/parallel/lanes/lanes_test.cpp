// Lanes of every instruction set of this CPU; fused_ops_test.cpp runs the kernels with the best one.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "parallel/lanes/instructions.h"

namespace megashard::kernels {
namespace {

#define MEGASHARD_WITH_LANES "tests/parallel/lanes/lanes_checks.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

/// All exponents and signs, with values that round down, up and to even; Inf, NaN; an odd number of values.
std::vector<float> all_kinds() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits <= 0xFFFFU; ++bits) {
    for (const uint32_t low : {0U, 1U, 0x0FFFU, 0x1000U, 0x1001U, 0x2000U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const uint32_t word = (bits << 16) | low;
      values.push_back(__builtin_bit_cast(float, word));
    }
  }
  values.push_back(1.5F);
  return values;
}

template <class T, class RoundTrip>
void expect_rounded(const RoundTrip& round_trip) {
  const auto values = all_kinds();
  std::vector<float> got;
  round_trip(values, got);
  int64_t wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const float wanted = static_cast<float>(T(values[i]));
    const bool same = std::isnan(wanted) ? std::isnan(got[i])
                                         : __builtin_bit_cast(uint32_t, wanted) == __builtin_bit_cast(uint32_t, got[i]);
    if (!same && ++wrong < 5) ADD_FAILURE() << values[i] << " became " << got[i] << ", not " << wanted;
  }
  EXPECT_EQ(wrong, 0);
}

constexpr auto kCheck = [](const auto& halves, const auto& brain_floats, const auto& exponentials, const auto& sum,
                           const auto& roots_and_squares, bool fuses) {
  expect_rounded<c10::Half>(halves);
  expect_rounded<c10::BFloat16>(brain_floats);
  std::vector<float> values, got;
  for (int i = -86'000; i <= 88'000; ++i) values.push_back(static_cast<float>(i) / 1000);
  exponentials(values, got);
  for (size_t i = 0; i < values.size(); ++i) {
    const double exact = std::exp(static_cast<double>(values[i]));
    ASSERT_LE(std::abs(got[i] - exact), 2.4e-7 * exact) << values[i];  // 2 ulp
  }
  exponentials({std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY}, got);
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_GT(got[1], 1e38F);
  EXPECT_LT(got[2], 1e-37F);
  for (const int count : {1, 3, 4, 16, 17, 100}) {
    std::vector<float> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 1.0F);
    EXPECT_EQ(sum(numbers), static_cast<float>(count * (count + 1) / 2));
  }
  std::vector<float> roots, squares;
  values.resize(1001);
  for (float& value : values) value = 1 - value / 100;
  roots_and_squares(values, roots, squares);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(roots[i], std::sqrt(values[i]));
    ASSERT_EQ(squares[i], fuses ? std::fma(values[i], values[i], -1.0F) : values[i] * values[i] - 1.0F);
  }
};

TEST(Lanes, OfAnyCpu) { any_cpu::run(kCheck); }

TEST(Lanes, OfAvx2) {
  if (!cpu_has(Instructions::kAvx2)) GTEST_SKIP() << "no AVX2 here";
  avx2::run(kCheck);
}

TEST(Lanes, OfAvx512) {
  if (!cpu_has(Instructions::kAvx512)) GTEST_SKIP() << "no AVX-512 here";
  avx512::run(kCheck);
}

}  // namespace
}  // namespace megashard::kernels
