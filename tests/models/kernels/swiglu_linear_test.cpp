// SwiGLU and the linear layer after it, without keeping the activation between them.

#include "models/kernels/linear_products.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/kernels/fused_ops.h"
#include "tests/models/kernels/against_fp64.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

TEST(SwigluLinear, HasTheNumbersOfFp64) {
  expect_same(
      {at::randn({2, 7, 33}) * 20, at::randn({2, 7, 33}), at::randn({17, 33}), at::randn({17})},
      [](const Tensors& in) { return swiglu_linear(in[0], in[1], in[2], in[3]); },
      [](const Tensors& in) { return at::linear(at::silu(in[0]) * in[1], in[2], in[3]); });
}

/// The result, the gradients of gate and up (columns of one tensor), and the gradients of the trainable parameters.
Tensors run(const at::Tensor& wide, const Tensors& trained, const at::Tensor& grad, const auto& body) {
  const auto parts = wide.chunk(2, -1);
  const Tensors leaves{parts[0].detach().requires_grad_(), parts[1].detach().requires_grad_()};
  auto results = Tensors{body(leaves[0], leaves[1])};
  Tensors inputs = leaves;
  inputs.insert(inputs.end(), trained.begin(), trained.end());
  const auto grads = torch::autograd::grad(results, inputs, {grad});
  results.insert(results.end(), grads.begin(), grads.end());
  return results;
}

TEST(SwigluLinear, HasTheBitsOfOneAfterTheOther) {
  MEGASHARD_NOT_ON_SIM("LibTorch's products there add up in another order");
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const auto wide = (at::randn({3, 5, 2 * 48}) * 3).to(dtype), grad = at::randn({3, 5, 31}).to(dtype);
    const auto weight = at::randn({31, 48}).to(dtype), bias = at::randn({31}).to(dtype);
    for (const bool frozen : {false, true}) {
      weight.set_requires_grad(!frozen);
      bias.set_requires_grad(!frozen);
      const auto trained = frozen ? Tensors{} : Tensors{weight, bias};
      const auto joint = run(wide, trained, grad, [&](const at::Tensor& gate, const at::Tensor& up) {
        return swiglu_linear(gate, up, weight, bias);
      });
      const auto apart = run(wide, trained, grad, [&](const at::Tensor& gate, const at::Tensor& up) {
        return linear(swiglu(gate, up), weight, bias);
      });
      for (size_t i = 0; i < apart.size(); ++i)
        EXPECT_TRUE(at::equal(joint[i], apart[i])) << dtype << " " << i << (frozen ? " frozen" : "");
    }
  }
}

TEST(SwigluLinear, KeepsNoProduct) {
  MEGASHARD_NOT_ON_SIM("it counts what the CPU's allocator gives");
  auto& allocator = *new CountingAllocator;
  const auto gate = at::rand({256, 512}).requires_grad_(), up = at::rand({256, 512}).requires_grad_();
  const auto weight = at::rand({8, 512}).requires_grad_();
  const auto before = allocator.live();
  const auto y = swiglu_linear(gate, up, weight, at::Tensor());
  EXPECT_EQ(allocator.live() - before, 256 * 8 * 4) << "more than the result";
  allocator.stop();
}

}  // namespace
}  // namespace megashard::testing
