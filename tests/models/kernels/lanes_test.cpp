// The lanes of every instruction set that this CPU has; fused_ops_test.cpp runs the kernels of the best.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define MEGASHARD_INLINE [[gnu::always_inline]] inline
#define MEGASHARD_EACH [&](int64_t j, int64_t count) __attribute__((always_inline))
#define MEGASHARD_DEFINE_CHECKS \
  template <class T> \
  void round_trip(const std::vector<float>& values, std::vector<float>& out) { \
    std::vector<T> rounded(values.size()); \
    out.resize(values.size()); \
    for_lanes(0, static_cast<int64_t>(values.size()), \
              MEGASHARD_EACH { write_lanes(read_lanes(values.data() + j, count), rounded.data() + j, count); }); \
    for_lanes(0, static_cast<int64_t>(values.size()), \
              MEGASHARD_EACH { write_lanes(read_lanes(rounded.data() + j, count), out.data() + j, count); }); \
  } \
  inline void exponentials(const std::vector<float>& values, std::vector<float>& out) { \
    out.resize(values.size()); \
    for_lanes(0, static_cast<int64_t>(values.size()), \
              MEGASHARD_EACH { write_lanes(exp_of(read_lanes(values.data() + j, count)), out.data() + j, count); }); \
  } \
  inline float sum(const std::vector<float>& values) { \
    Floats sums{}; \
    for_lanes(0, static_cast<int64_t>(values.size()), \
              MEGASHARD_EACH { sums += read_lanes(values.data() + j, count); }); \
    return sum_of(sums); \
  } \
  template <class Check> \
  void run(const Check& check) { \
    check(round_trip<c10::Half>, round_trip<c10::BFloat16>, exponentials, sum); \
  }

namespace megashard::kernels {
namespace {

#define MEGASHARD_LANES 4
namespace any_cpu {
#include "models/kernels/lanes.inc"
MEGASHARD_DEFINE_CHECKS
}  // namespace any_cpu
#undef MEGASHARD_LANES

#if defined(__x86_64__) && !defined(__clang__)
#define MEGASHARD_LANES 8
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "models/kernels/lanes.inc"
MEGASHARD_DEFINE_CHECKS
}  // namespace avx2
#pragma GCC pop_options
#undef MEGASHARD_LANES

#define MEGASHARD_LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "models/kernels/lanes.inc"
MEGASHARD_DEFINE_CHECKS
}  // namespace avx512
#pragma GCC pop_options
#undef MEGASHARD_LANES
#endif

/// Of every exponent and sign, with what rounds down, up and to even; infinities, NaN; an odd number of them.
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

constexpr auto kCheck = [](const auto& halves, const auto& brain_floats, const auto& exponentials, const auto& sum) {
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
};

TEST(Lanes, OfAnyCpu) { any_cpu::run(kCheck); }

#if defined(__x86_64__) && !defined(__clang__)
TEST(Lanes, OfAvx2) {
  if (__builtin_cpu_supports("avx2") == 0 || __builtin_cpu_supports("fma") == 0) GTEST_SKIP() << "no AVX2 here";
  avx2::run(kCheck);
}

TEST(Lanes, OfAvx512) {
  if (__builtin_cpu_supports("avx512bw") == 0 || __builtin_cpu_supports("avx512vl") == 0)
    GTEST_SKIP() << "no AVX-512 here";
  avx512::run(kCheck);
}
#endif

}  // namespace
}  // namespace megashard::kernels
