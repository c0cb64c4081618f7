#include "framework/data/numpy_random.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace megashard {
namespace {

std::vector<int> shuffled(NumpyRandomState& random, int count) {
  std::vector<int> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  random.shuffle(std::span(values));
  return values;
}

// numpy.random.RandomState(1234): shuffle(arange(10)), then shuffle(arange(7)).
TEST(NumpyRandomState, ShufflesAsNumpy) {
  NumpyRandomState random(1234);
  EXPECT_EQ(shuffled(random, 10), (std::vector{7, 2, 9, 1, 0, 8, 4, 5, 6, 3}));
  EXPECT_EQ(shuffled(random, 7), (std::vector{6, 4, 0, 5, 3, 2, 1}));
}

TEST(NumpyRandomState, ShufflesAsNumpyAcrossPowersOfTwo) {
  NumpyRandomState random(42);
  EXPECT_EQ(shuffled(random, 33), (std::vector{31, 15, 26, 17, 8,  9,  19, 21, 12, 0, 4,  16, 5, 13, 11, 24, 1,
                                               2,  29, 3,  27, 23, 30, 22, 18, 25, 6, 20, 32, 7, 10, 14, 28}));
  EXPECT_EQ(shuffled(random, 7), (std::vector{0, 6, 2, 4, 5, 3, 1}));
}

TEST(NumpyRandomState, RefusesSeedsThatNumpyRefuses) {
  EXPECT_ANY_THROW(NumpyRandomState(-1));
  EXPECT_ANY_THROW(NumpyRandomState(int64_t{1} << 32));
}

// numpy.sum([1 / 3, 1 / 4, ...]). For eight or more values a plain loop gives other bits.
TEST(NumpySum, AddsPairwiseAsNumpy) {
  const std::vector<std::pair<int, double>> golden = {
      {5, 0x1.17c57c57c57c5p+0},  {8, 0x1.6dd0dd0dd0dd0p+0},   {10, 0x1.9a6c03d783499p+0}, {12, 0x1.c066637d7da93p+0},
      {31, 0x1.4b5dbd81bf41cp+1}, {150, 0x1.06ae320f8492bp+2}, {300, 0x1.3283d93b7feebp+2}};
  for (const auto& [count, sum] : golden) {
    std::vector<double> values;
    for (int i = 0; i < count; ++i) {
      values.push_back(1.0 / (i + 3));
    }
    EXPECT_EQ(numpy_sum(values), sum) << count;
  }
}

}  // namespace
}  // namespace megashard
