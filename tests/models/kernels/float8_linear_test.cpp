#include "models/kernels/float8_linear.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tests/support/formula.h"

namespace megashard {
namespace {

/// Rounds to e4m3 (e5m2), in fp64: the nearest number with 3 (2) binary digits, ties to even. Below 2^-6 (2^-14) the
/// grid is 2^-9 (2^-16).
double nearest(double x, at::ScalarType format) {
  const bool e5m2 = format == at::kFloat8_e5m2;
  const int digits = e5m2 ? 2 : 3, least = e5m2 ? -14 : -6;
  if (x == 0) return 0;
  const int exponent = std::max(std::ilogb(x), least);
  const double step = std::ldexp(1.0, exponent - digits);
  return std::nearbyint(x / step) * step;
}

double largest_of(at::ScalarType format) { return format == at::kFloat8_e5m2 ? 57344 : 448; }

/// Rounded with one scale for all numbers, or with one for each `block` of a row.
at::Tensor rounded(const at::Tensor& x, at::ScalarType format, int64_t block) {
  const at::Tensor result = x.to(at::kDouble).contiguous().clone();
  const int64_t rows = result.size(0), length = result.size(1);
  const double largest = largest_of(format);
  auto* number = result.mutable_data_ptr<double>();
  const auto round = [&](int64_t begin, int64_t end) {
    double amax = 0;
    for (int64_t i = begin; i < end; ++i) amax = std::max(amax, std::abs(number[i]));
    if (amax == 0) return;
    double scale = amax / largest;
    if (block > 0) scale = std::exp2(std::ceil(std::log2(scale)));
    for (int64_t i = begin; i < end; ++i) number[i] = nearest(number[i] / scale, format) * scale;
  };
  if (block == 0) round(0, rows * length);
  for (int64_t row = 0; block > 0 && row < rows; ++row) {
    for (int64_t i = 0; i < length; i += block) round(row * length + i, row * length + std::min(i + block, length));
  }
  return result;
}

class Float8LinearTest : public ::testing::TestWithParam<Float8Options> {};

TEST_P(Float8LinearTest, ProductsAreThoseOfRoundedNumbers) {
  const auto options = GetParam();
  const int64_t block = options.recipe == Float8Recipe::kMxfp8 ? 32 : 0;
  const auto e4m3 = at::kFloat8_e4m3fn;
  for (const auto& [rows, in, out] : {std::tuple{6L, 64L, 32L}, {48L, 32L, 96L}, {5L, 48L, 18L}}) {
    auto x = testing::fixed({rows, in}, 1).cpu();
    x.select(0, 1).mul_(100);
    x.select(0, 2).zero_();
    const auto w = testing::fixed({out, in}, 2).cpu(), b = testing::fixed({out}, 3).cpu();
    const auto grad = testing::fixed({rows, out}, 4).cpu();
    const auto device = at::empty({0}).device();
    auto x_here = x.to(device).clone().requires_grad_(), w_here = w.to(device).clone().requires_grad_();
    const auto y = float8_linear(x_here.view({1, rows, in}), w_here, b.to(device), options);
    y.backward(grad.to(device).view({1, rows, out}));
    const auto product = [&](const at::Tensor& left, at::ScalarType format, const at::Tensor& right) {
      return at::mm(rounded(left, format, block), rounded(right, e4m3, block).t());
    };
    const auto near = [&](const at::Tensor& got, const at::Tensor& expected, const char* what) {
      const auto distance = (got.detach().cpu().to(at::kDouble) - expected).abs().max().item<double>();
      EXPECT_LE(distance, 2e-6 * expected.abs().max().item<double>()) << what << " of " << rows << " rows";
    };
    near(y.view({rows, out}), product(x, e4m3, w) + b, "y");
    near(x_here.grad(), product(grad, options.gradient_format, w.t()), "the gradient of x");
    near(w_here.grad(), product(grad.t(), options.gradient_format, x.t()), "the gradient of W");
  }
}

TEST_P(Float8LinearTest, AnInfinityIsSeen) {
  const auto x = at::ones({32, 32}), w = at::ones({32, 32});
  x.select(0, 3).select(0, 5).fill_(std::numeric_limits<float>::infinity());
  const auto y = float8_linear(x, w, at::Tensor(), GetParam());
  EXPECT_FALSE(y.isfinite().all().item<bool>());
}

TEST_P(Float8LinearTest, NoRowsHaveGradientsOfZero) {
  auto x = at::empty({0, 32}).requires_grad_(), w = at::ones({32, 32}).requires_grad_();
  float8_linear(x, w, at::Tensor(), GetParam()).sum().backward();
  EXPECT_EQ(w.grad().abs().sum().item<float>(), 0);
}

TEST_P(Float8LinearTest, ASecondDerivativeIsRefused) {
  const auto x = at::randn({32, 32}).requires_grad_();
  const auto y = float8_linear(x, at::ones({32, 32}), at::Tensor(), GetParam()).sum();
  EXPECT_THAT([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("float8_linear has no second derivative")));
}

INSTANTIATE_TEST_SUITE_P(Recipes, Float8LinearTest,
                         ::testing::Values(Float8Options{Float8Recipe::kTensorwise, at::kFloat8_e5m2},
                                           Float8Options{Float8Recipe::kTensorwise, at::kFloat8_e4m3fn},
                                           Float8Options{Float8Recipe::kMxfp8, at::kFloat8_e5m2},
                                           Float8Options{Float8Recipe::kMxfp8, at::kFloat8_e4m3fn}));

}  // namespace
}  // namespace megashard
