// Products of every tile, compared with fp64.

#include "framework/packed_product.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::fixed;

constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();

at::Tensor rows_of(int64_t rows, int64_t columns, uint64_t seed) { return fixed({rows, columns}, seed); }
at::Tensor columns_of(int64_t rows, int64_t columns, uint64_t seed) { return rows_of(columns, rows, seed).t(); }

/// Into columns of a wider tensor, whose other columns must stay.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  const auto wide = at::full({a.size(0), b.size(1) + 5}, kNoNumber);
  packed_product_into(wide.narrow(1, 2, b.size(1)), a, b);
  EXPECT_EQ(wide.isnan().sum().item<int64_t>(), 5 * a.size(0));
  return wide.narrow(1, 2, b.size(1)).contiguous();
}

TEST(PackedProduct, OfAllSizesIsTheFormula) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  for (const int64_t columns : {32, 33, 63, 64, 100}) {
    for (const int64_t depth : {1, 15, 16, 47, 256, 257, 600}) {
      for (const int64_t rows : {3, 4, 7, 8, 11, 12, 13, 25, 100}) {
        for (const bool across : {false, true}) {
          const auto a = across ? columns_of(rows, depth, 1) : rows_of(rows, depth, 1);
          const auto b = across ? columns_of(depth, columns, 2) : rows_of(depth, columns, 2);
          const auto exact = at::mm(a.to(at::kDouble), b.to(at::kDouble));
          // In fp32, in any order: `depth` roundings of what the magnitudes sum up to.
          const double most = at::mm(a.abs().to(at::kDouble), b.abs().to(at::kDouble)).max().item<double>();
          EXPECT_LE((product(a, b) - exact).abs().max().item<double>(), 6e-8 * static_cast<double>(depth + 2) * most)
              << rows << " x " << depth << " x " << columns << " " << across;
        }
      }
    }
  }
}

/// A long sum of equal numbers rounds in one direction.
TEST(PackedProduct, LongSumsRoundLikeShortOnes) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  const auto sums = product(at::full({16, 8192}, 0.1F), at::ones({8192, 32}));
  EXPECT_LE((sums.to(at::kDouble) / (8192 * static_cast<double>(0.1F)) - 1).abs().max().item<double>(), 5e-6);
}

TEST(PackedProduct, RowsHaveTheSameBitsInAnyCompanyAndByAnyThreads) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  const auto a = rows_of(700, 300, 1), b = columns_of(300, 203, 2);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = product(a, b);
  at::set_num_threads(3);
  const auto three = product(a, b);
  at::set_num_threads(threads);
  EXPECT_TRUE(one.equal(three));
  for (const int64_t rows : {3, 8, 50}) EXPECT_TRUE(product(a.narrow(0, 100, rows), b).equal(one.narrow(0, 100, rows)));
}

TEST(PackedProduct, TakesNoFewRowsNorOddStridesNorTinyProducts) {
  MEGASHARD_NOT_ON_SIM("of the CPU's products");
  const auto a = at::ones({40, 400}), b = at::ones({400, 64});
  EXPECT_TRUE(takes_packed_product(a, b));
  EXPECT_TRUE(takes_packed_product(a.narrow(0, 0, 3), b));
  EXPECT_FALSE(takes_packed_product(a.narrow(0, 0, 2), b));
  EXPECT_FALSE(takes_packed_product(a, b.narrow(1, 0, 31)));
  EXPECT_FALSE(takes_packed_product(a, at::ones({800, 128}).slice(0, 0, 800, 2).slice(1, 0, 128, 2)));
  EXPECT_FALSE(takes_packed_product(a.narrow(1, 0, 20), b.narrow(0, 0, 20)));
  EXPECT_FALSE(takes_packed_product(a.narrow(1, 0, 0), b.narrow(0, 0, 0)));
}

}  // namespace
}  // namespace megashard
