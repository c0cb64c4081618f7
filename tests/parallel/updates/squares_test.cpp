#include "parallel/updates/squares.h"

#include <gtest/gtest.h>

#include <array>

#include "parallel/updates/squares_table.h"
#include "tests/parallel/updates/adamw_cases.h"

namespace megashard::testing {
namespace {

template <class OfThread>
double sum_of_block(const OfThread& of_thread) {
  std::array<double, SquaresTable::kThreads> sums{};
  for (int thread = 0; thread < SquaresTable::kThreads; ++thread) sums[static_cast<size_t>(thread)] = of_thread(thread);
  for (int distance = SquaresTable::kThreads / 2; distance > 0; distance /= 2) {
    for (int thread = 0; thread < distance; ++thread) add_partner(sums.data(), distance, thread);
  }
  return sums[0];
}

/// The kernels, their threads run sequentially.
double by_threads(const std::vector<at::Tensor>& tensors) {
  std::vector<double> sums(100);
  const int64_t count = make_squares_tables(tensors, sums.data(), [](const SquaresTable& table) {
    for (int64_t tile = 0; tile < table.tiles; ++tile)
      table.sums[tile] = sum_of_block([&](int thread) { return squares_of_thread(table, tile, thread); });
  });
  double total = 0;
  const SquaresTotal of{.sums = sums.data(), .total = &total, .count = count};
  return sum_of_block([&](int thread) { return total_of_thread(of, thread); });
}

TEST(Squares, AreSummedInFp64) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    auto gradients = AdamWShards({.gradient = dtype}, c10::kCPU).gradient;
    EXPECT_TRUE(std::isnan(by_threads(gradients)));
    gradients.erase(gradients.begin() + 2);  // with the NaN
    gradients.push_back(at::full({100'001}, 0.25, dtype));
    double expected = 0;
    for (const auto& each : gradients) expected += each.to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(by_threads(gradients), expected, 1e-14 * expected) << dtype;  // different order of additions
  }
  EXPECT_EQ(by_threads({}), 0);
}

TEST(Squares, OneLaunchForAllGradients) {
  const std::vector<at::Tensor> many(SquaresTable::kCapacity, at::full({1}, 2.0F));
  std::vector<double> sums(2 * many.size());
  int launches = 0;
  const auto count = [&](const SquaresTable&) { ++launches; };
  EXPECT_EQ(make_squares_tables(many, sums.data(), count), SquaresTable::kCapacity);
  EXPECT_EQ(launches, 1);
  auto more = many;
  more.push_back(many.front());
  EXPECT_EQ(make_squares_tables(more, sums.data(), count), SquaresTable::kCapacity + 1);
  EXPECT_EQ(launches, 3);
}

}  // namespace
}  // namespace megashard::testing
