#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>
#include <vector>

namespace megashard::testing {

using Tensors = std::vector<at::Tensor>;

inline double error(const at::Tensor& got, const at::Tensor& want) {
  return ((got.to(at::kDouble) - want).abs().max() / want.abs().max()).item<double>();
}

/// Compares value and gradients of `fused` in each dtype with those of `plain` in fp64, on the same (rounded) inputs.
/// No backend has kernels for fp64: operators compute it. `times`: multiplies the tolerances where operators round more
/// often.
template <class Fused, class Plain>
void expect_same(const Tensors& inputs, const Fused& fused, const Plain& plain, double times = 1) {
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 2e-6}, std::pair{at::kBFloat16, 2e-2},
                                         std::pair{at::kHalf, 2.5e-3}, std::pair{at::kDouble, 2e-6}}) {
    const double bar = tolerance * times;
    Tensors narrow;
    Tensors wide;
    for (const auto& input : inputs) {
      narrow.push_back(input.to(dtype).detach().requires_grad_());
      wide.push_back(narrow.back().detach().to(at::kDouble).requires_grad_());
    }
    const auto y = fused(narrow);
    const auto reference = plain(wide);
    EXPECT_LT(error(y.detach(), reference.detach()), bar) << dtype;
    const auto grad = at::randn(y.sizes());
    const auto grads = torch::autograd::grad({y}, narrow, {grad.to(y.scalar_type())}, {}, false, true);
    const auto wanted =
        torch::autograd::grad({reference}, wide, {grad.to(y.scalar_type()).to(at::kDouble)}, {}, false, true);
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_LT(error(grads[i], wanted[i]), bar) << dtype << " " << i;
  }
}

}  // namespace megashard::testing
