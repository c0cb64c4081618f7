// Sums of the rows that tokens have chosen: compared with fp64, whose sums LibTorch's operators compute.

#include "models/kernels/chosen_rows.h"

#include <ATen/ops/randperm.h>
#include <gtest/gtest.h>

#include "tests/models/kernels/against_fp64.h"
#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

TEST(ChosenRows, WeightedSumsHaveTheNumbersOfFp64) {
  MEGASHARD_NOT_ON_SIM("the comparison runs on the CPU");
  for (const auto& [tokens, choices, width] :
       {std::tuple{1L, 1L, 1L}, {5L, 2L, 33L}, {300L, 4L, 384L}, {7L, 8L, 16L}}) {
    const auto place = at::randperm(tokens * choices, at::kLong).view({tokens, choices});
    const auto sum = [&, place = place](const Tensors& all) { return weighted_sum_of_rows(all[0], place, all[1]); };
    expect_same({fixed({tokens * choices, width}, 1), fixed({tokens, choices}, 2)}, sum, sum, 2);
  }
}

TEST(ChosenRows, OfTransposedRowsAndWeights) {
  MEGASHARD_NOT_ON_SIM("the comparison runs on the CPU");
  const auto place = at::randperm(12, at::kLong).view({6, 2});
  const auto sum = [&](const Tensors& all) { return weighted_sum_of_rows(all[0].t(), place, all[1].t()); };
  expect_same({fixed({20, 12}, 1), fixed({2, 6}, 2)}, sum, sum, 2);
}

TEST(ChosenRows, SumsAreThoseOfWeightsOfOne) {
  const auto device = device_of_tests();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto x = fixed({24, 35}, 1).to(device, dtype);
    const auto place = at::randperm(24, at::kLong).view({6, 4}).to(device);
    EXPECT_TRUE(
        sum_of_rows(x, place).equal(weighted_sum_of_rows(x, place, fixed({6, 4}, 2).to(device, dtype).fill_(1))));
  }
}

TEST(ChosenRows, OfNoTokens) {
  const auto none = fixed({0, 8}, 1).to(device_of_tests());
  const auto place = fixed({0, 2}, 1).to(device_of_tests(), at::kLong);
  EXPECT_EQ(weighted_sum_of_rows(none, place, fixed({0, 2}, 1).to(device_of_tests())).sizes(), (at::IntArrayRef{0, 8}));
}

}  // namespace
}  // namespace megashard::testing
