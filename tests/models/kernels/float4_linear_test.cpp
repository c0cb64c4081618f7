#include "models/kernels/float4_linear.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "tests/support/formula.h"

namespace megashard {
namespace {

/// The number of E2M1 that is nearest to |x| <= 6, of two the even one; or with `u` in [0, 1) the lower or upper one.
float float4_of(float x, const float* u) {
  constexpr std::array<float, 8> kNumbers{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const float size = std::abs(x);
  const size_t upper = static_cast<size_t>(std::ranges::lower_bound(kNumbers, size) - kNumbers.begin());
  size_t taken = upper;
  if (kNumbers[upper] != size) {
    const float share = (size - kNumbers[upper - 1]) / (kNumbers[upper] - kNumbers[upper - 1]);
    const bool up = u != nullptr ? share + *u >= 1 : share > 0.5F || (share == 0.5F && upper % 2 == 0);
    taken = up ? upper : upper - 1;
  }
  return std::copysign(kNumbers[taken], x);
}

/// Values of x [rows, length], in blocks of `block_rows` x 16 numbers. `draws` [rows, length]: undefined: to the
/// nearest.
at::Tensor in_float4(const at::Tensor& x, int64_t block_rows, const at::Tensor& draws) {
  const auto result = x.to(at::kBFloat16).to(at::kFloat).contiguous().clone();
  auto numbers = result.accessor<float, 2>();
  const float of_all = result.abs().max().item<float>() / 2688;
  for (int64_t row = 0; row < x.size(0); row += block_rows) {
    for (int64_t column = 0; column < x.size(1); column += 16) {
      float amax = 0;
      const auto visit = [&](auto&& each) {
        for (int64_t i = row; i < row + block_rows; ++i)
          for (int64_t j = column; j < column + 16; ++j) each(i, j);
      };
      visit([&](int64_t i, int64_t j) { amax = std::max(amax, std::abs(numbers[i][j])); });
      const float wanted = std::clamp(amax / 6 / of_all, 0.015625F, 448.0F);
      const auto scale = static_cast<float>(static_cast<c10::Float8_e4m3fn>(wanted));
      visit([&](int64_t i, int64_t j) {
        const float fitted = std::clamp(numbers[i][j] * (1 / of_all / scale), -6.0F, 6.0F);
        const float u = draws.defined() ? draws[i][j].item<float>() : 0;
        numbers[i][j] = float4_of(fitted, draws.defined() ? &u : nullptr) * scale * of_all;
      });
    }
  }
  return result;
}

/// [R, length] with zeros up to a multiple of 16, each 16 numbers mixed.
at::Tensor mixed_rows(const at::Tensor& rows) {
  constexpr std::array<int, 16> kSignsOfRecipe{1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  at::Tensor matrix = at::ones({1, 1}, rows.options());
  for (int i = 0; i < 4; ++i) matrix = at::cat({at::cat({matrix, matrix}, 1), at::cat({matrix, -matrix}, 1)}, 0);
  for (int64_t i = 0; i < 16; ++i) matrix[i].mul_(kSignsOfRecipe[static_cast<size_t>(i)] / 4.0);
  const auto whole = at::constant_pad_nd(rows, {0, (16 - rows.size(1) % 16) % 16});
  return at::mm(whole.reshape({-1, 16}), matrix).to(at::kBFloat16).to(at::kFloat).view(whole.sizes());
}

TEST(Float4Linear, ProductsAreThoseOfRoundedNumbers) {
  for (const auto& [rows, in, out] : {std::tuple{6L, 64L, 32L}, {48L, 32L, 96L}, {5L, 48L, 16L}}) {
    auto x = testing::fixed({rows, in}, 1).cpu().to(at::kFloat);
    x.select(0, 1).mul_(100);
    x.select(0, 2).zero_();
    const auto w = testing::fixed({out, in}, 2).cpu().to(at::kFloat), b = testing::fixed({out}, 3).cpu();
    const auto grad = testing::fixed({rows, out}, 4).cpu().to(at::kFloat);
    const auto device = at::empty({0}).device();
    auto x_here = x.to(device).clone().requires_grad_(), w_here = w.to(device).clone().requires_grad_();
    const auto y = float4_linear(x_here.view({1, rows, in}), w_here, b.to(device));
    at::manual_seed(5);
    y.backward(grad.to(device).view({1, rows, out}));
    at::manual_seed(5);
    const int64_t whole = (rows + 15) / 16 * 16;
    const auto draws = at::rand({rows, 1, out / 16, 16}, device).cpu().view({rows, out});
    const auto draws_of_columns = at::rand({out, 1, whole / 16, 16}, device).cpu().view({out, whole});
    const auto near = [&, rows = rows](const at::Tensor& got, const at::Tensor& expected, const char* what) {
      const auto distance = (got.detach().cpu() - expected).abs().max().item<double>();
      EXPECT_LE(distance, 2e-6 * expected.abs().max().item<double>()) << what << " of " << rows << " rows";
    };
    const auto weight = in_float4(w, 16, {});
    const auto columns = [](const at::Tensor& each) { return mixed_rows(each.to(at::kBFloat16).to(at::kFloat).t()); };
    near(y.view({rows, out}), at::mm(in_float4(x, 1, {}), weight.t()) + b, "y");
    near(x_here.grad(), at::mm(in_float4(grad, 1, draws), weight), "the gradient of x");
    near(w_here.grad(), at::mm(in_float4(columns(grad), 1, draws_of_columns), in_float4(columns(x), 1, {}).t()),
         "the gradient of W");
  }
}

TEST(Float4Linear, RandomRoundingIsRightOnAverage) {
  const auto x = testing::fixed({4, 32}, 6).to(at::kBFloat16).to(at::kFloat);
  const auto near = rounded_to_float4(x, 1, false);
  auto sum = at::zeros_like(x);
  constexpr int kTimes = 400;
  for (int i = 0; i < kTimes; ++i) {
    const auto [numbers, scale] = rounded_to_float4(x, 1, true);
    sum.add_(numbers * scale);
  }
  const auto largest_step = (near.numbers * near.scale).abs().max().item<double>() / 3;
  EXPECT_LE((sum / kTimes - x).abs().max().item<double>(), 5 * largest_step / 2 / std::sqrt(kTimes));
}

TEST(Float4Linear, AnInfinityIsSeenAndZerosAreZeros) {
  const auto x = at::ones({16, 32}), w = at::ones({32, 32});
  EXPECT_EQ(float4_linear(at::zeros_like(x), w, at::Tensor()).abs().max().item<float>(), 0);
  x.select(0, 3).select(0, 5).fill_(std::numeric_limits<float>::infinity());
  EXPECT_FALSE(float4_linear(x, w, at::Tensor()).isfinite().all().item<bool>());
}

TEST(Float4Linear, NoRowsHaveGradientsOfZero) {
  auto x = at::empty({0, 32}).requires_grad_(), w = at::ones({32, 32}).requires_grad_();
  float4_linear(x, w, at::Tensor()).sum().backward();
  EXPECT_EQ(w.grad().abs().sum().item<float>(), 0);
}

TEST(Float4Linear, ASecondDerivativeIsRefused) {
  const auto x = at::randn({32, 32}).requires_grad_();
  const auto y = float4_linear(x, at::ones({32, 32}), at::Tensor()).sum();
  EXPECT_THAT([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("float4_linear has no second derivative")));
}

}  // namespace
}  // namespace megashard
