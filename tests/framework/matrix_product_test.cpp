#include "framework/matrix_product.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "tests/support/formula.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using testing::fixed;

at::Tensor here(const at::Tensor& x) { return x.to(testing::device_of_tests()); }

struct Expected {
  at::Tensor exact;
  double bar;
};

/// Sums of k products in fp32, in any order, are that near: k roundings of what the magnitudes sum up to.
Expected product_of(const at::Tensor& a, const at::Tensor& b) {
  const auto wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  const double largest = at::mm(wide_a.abs(), wide_b.abs()).max().item<double>();
  return {at::mm(wide_a, wide_b), 6e-8 * static_cast<double>(a.size(1) + 2) * largest};
}

void expect_near(const at::Tensor& got, const Expected& expected) {
  EXPECT_LE((got.cpu().to(at::kDouble) - expected.exact).abs().max().item<double>(), expected.bar) << got.sizes();
}

TEST(MatrixProduct, OfAnyStridesIsTheFormula) {
  for (const auto& [n, k, m] : {std::tuple{7L, 5L, 3L}, {128L, 96L, 160L}, {1L, 1500L, 1001L}, {300L, 257L, 1L}}) {
    const auto a = fixed({n, k}, 1).cpu(), b = fixed({k, m}, 2).cpu(), c = fixed({n, m}, 3).cpu();
    const auto expected = product_of(a, b);
    const auto transposed = [](const at::Tensor& x) { return here(x.t().contiguous()).t(); };
    const auto part = [](const at::Tensor& x) {  // of a wider matrix
      const auto wide = at::zeros({x.size(0), x.size(1) + 3}, here(x).options());
      const auto inside = wide.narrow(1, 2, x.size(1));
      return inside.copy_(x);
    };
    expect_near(matrix_product(here(a), here(b)), expected);
    expect_near(matrix_product(transposed(a), transposed(b)), expected);
    expect_near(matrix_product(part(a), transposed(b)), expected);
    expect_near(matrix_product(transposed(a), part(b)), expected);
    const auto sum = here(c);
    expect_near(matrix_product(sum, -0.5, here(a), here(b), 2),
                {2 * expected.exact - 0.5 * c.to(at::kDouble), 2 * expected.bar + 1e-6});
    EXPECT_TRUE(sum.cpu().equal(c)) << "c stays";
  }
}

TEST(MatrixProduct, OfNothing) {
  const auto none = here(at::zeros({0, 1500})), some = here(at::ones({1500, 1500}));
  EXPECT_EQ(matrix_product(none, some).sizes(), (at::IntArrayRef{0, 1500}));
  EXPECT_EQ(matrix_product(some.narrow(1, 0, 0), none.narrow(1, 0, 1000)).abs().sum().item<float>(), 0);
}

TEST(MatrixProduct, OtherDtypesAreLibTorchs) {
  const auto a = here(fixed({160, 160}, 1)).to(at::kDouble);
  EXPECT_FALSE(has_own_products(a));
  EXPECT_TRUE(matrix_product(a, a).equal(at::mm(a, a)));
}

}  // namespace
}  // namespace megashard
