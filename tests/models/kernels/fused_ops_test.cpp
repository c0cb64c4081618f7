#include "models/kernels/fused_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/models/kernels/against_fp64.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/simulated_device.h"

namespace megashard {
namespace {

using at::Tensor;
using testing::expect_same;
using testing::Tensors;

TEST(FusedOps, Linear) {
  expect_same(
      {at::randn({2, 5, 30}), at::randn({17, 30}), at::randn({17})},
      [](const Tensors& in) { return linear(in[0], in[1], in[2]); },
      [](const Tensors& in) { return in[0].matmul(in[1].t()) + in[2]; });
  expect_same(
      {at::randn({4, 30}), at::randn({17, 30})}, [](const Tensors& in) { return linear(in[0], in[1], at::Tensor()); },
      [](const Tensors& in) { return in[0].matmul(in[1].t()); });
}

TEST(FusedOps, RmsNorm) {
  expect_same(
      {at::randn({3, 5, 37}) * 3, at::randn({37})},  // 37: full lanes and a remainder
      [](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5); },
      [](const Tensors& in) { return in[1] * in[0] * (in[0].square().mean({-1}, true) + 1e-5).rsqrt(); });
}

TEST(FusedOps, ASumAndItsNormHaveTheBitsOfOneAfterTheOther) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const auto normal = [&](at::IntArrayRef sizes) { return at::randn(sizes).to(dtype).requires_grad_(); };
    const Tensors inputs{normal({3, 5, 37}), normal({3, 5, 37}), normal({37})};
    const Tensors grads{at::randn({3, 5, 37}).to(dtype), at::randn({3, 5, 37}).to(dtype)};
    const auto [sum, normed] = add_rms_norm(inputs[0], inputs[1], inputs[2], 1e-5);
    const auto sum_alone = inputs[0] + inputs[1];
    const auto normed_alone = rms_norm(sum_alone, inputs[2], 1e-5);
    EXPECT_TRUE(at::equal(sum, sum_alone) && at::equal(normed, normed_alone)) << dtype;
    const auto got = torch::autograd::grad({sum, normed}, inputs, grads);
    const auto wanted = torch::autograd::grad({sum_alone, normed_alone}, inputs, grads);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << dtype << " " << i;
  }
}

TEST(FusedOps, RotateWithStridesAndARest) {
  const auto angles = at::rand({4, 3}) * 6;
  const auto cos = angles.cos();
  const auto sin = angles.sin();
  const auto plain = [](const Tensor& x, const Tensor& c, const Tensor& s) {
    const auto a = x.narrow(3, 0, 3);
    const auto b = x.narrow(3, 3, 3);
    return at::cat({a * c - b * s, b * c + a * s, x.narrow(3, 6, 2)}, 3);
  };
  expect_same(
      {at::randn({2, 5, 4, 8})},  // [B, H, T, D], rotated as its transpose
      [&](const Tensors& in) {
        const auto dtype = in[0].scalar_type();
        return rotate(in[0].transpose(1, 2), cos.to(dtype), sin.to(dtype));
      },
      [&](const Tensors& in) {
        return plain(in[0].transpose(1, 2), cos.to(at::kDouble).unsqueeze(1), sin.to(at::kDouble).unsqueeze(1));
      });
}

TEST(FusedOps, Swiglu) {
  const auto wide_range = at::randn({7, 33}) * 20;  // exp saturates on both sides
  expect_same(
      {wide_range, at::randn({7, 33})}, [](const Tensors& in) { return swiglu(in[0], in[1]); },
      [](const Tensors& in) { return at::silu(in[0]) * in[1]; });
}

TEST(FusedOps, ATiedWeightHasTwoGradientsAtMost) {
  MEGASHARD_NOT_ON_SIM("it counts what the CPU's allocator gives");
  auto& allocator = *new testing::CountingAllocator;
  Tensors gradients;
  for (const bool tied : {false, true}) {
    const auto weight = (at::arange(8192) / 8192).view({1024, 8}).requires_grad_();
    const auto x = at::embedding(weight, at::arange(4));
    const auto loss = at::linear(x, tied ? with_own_gradient(weight) : weight).sum();
    const auto before = allocator.live();
    allocator.reset_peak();
    loss.backward();
    const auto weights = static_cast<double>(allocator.peak() - before) / (8192 * 4);
    EXPECT_NEAR(weights, tied ? 2 : 3, 0.1);
    gradients.push_back(weight.grad());
  }
  allocator.stop();
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

TEST(FusedOps, ASecondDerivativeIsRefused) {
  const auto x = at::randn({2, 4}).requires_grad_();
  const auto y = rms_norm(x, at::ones({4}), 1e-5).sum();
  EXPECT_THAT([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("no second derivative")));
}

}  // namespace
}  // namespace megashard
