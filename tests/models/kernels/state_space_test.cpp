#include "models/kernels/state_space.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace megashard {
namespace {

/// Token by token.
at::Tensor scanned_by_token(const StateSpaceInputs& inputs) {
  const auto& [x, step, rate, b, c, begins] = inputs;
  const int64_t rows = x.size(0), length = x.size(1), heads = x.size(2), sharing = heads / b.size(2);
  std::vector<at::Tensor> results;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      auto state = at::zeros({b.size(3), x.size(3)}, at::kDouble);
      for (int64_t t = 0; t < length; ++t) {
        if (begins.defined() && begins[row][t].item<int64_t>() == t) state = at::zeros_like(state);
        const auto delta = step[row][t][head];
        state = state * (delta * rate[head]).exp() + at::outer(b[row][t][head / sharing], delta * x[row][t][head]);
        results.push_back(state.t().mv(c[row][t][head / sharing]));
      }
    }
  }
  return at::stack(results).view({rows, heads, length, x.size(3)}).transpose(1, 2);
}

double relative_error(const at::Tensor& ours, const at::Tensor& wanted) {
  return ((ours - wanted).abs().max() / wanted.abs().max()).item<double>();
}

struct ScanCase {
  int64_t rows, length, groups, heads, state_dim, head_dim;
  std::vector<int64_t> documents{};  // of each row; empty: one
};

TEST(StateSpace, IsItsRecurrence) {
  for (const ScanCase& each :
       {ScanCase{2, 5, 1, 1, 4, 3}, ScanCase{1, 64, 2, 4, 6, 5}, ScanCase{2, 131, 1, 3, 4, 8},
        ScanCase{2, 150, 2, 2, 5, 4, {1, 63, 70, 16}}, ScanCase{1, 200, 1, 2, 4, 4, {130, 1, 1, 68}}}) {
    SCOPED_TRACE(each.length);
    at::manual_seed(static_cast<uint64_t>(each.length));
    const auto drawn = [&](int64_t heads, int64_t dim) {
      return at::randn({each.rows, each.length, heads, dim}, at::kDouble).requires_grad_();
    };
    StateSpaceInputs inputs{.x = drawn(each.heads, each.head_dim),
                            .step = at::rand({each.rows, each.length, each.heads}, at::kDouble).requires_grad_(),
                            .rate = (-2 * at::rand({each.heads}, at::kDouble)).requires_grad_(),
                            .b = drawn(each.groups, each.state_dim),
                            .c = drawn(each.groups, each.state_dim),
                            .begins = {}};
    if (!each.documents.empty()) {
      inputs.begins = at::zeros({each.rows, each.length}, at::kLong);
      int64_t begin = 0;
      for (const int64_t length : each.documents) {
        inputs.begins.narrow(1, begin, length).fill_(begin);
        begin += length;
      }
    }
    const auto ours = state_space_scan(inputs), wanted = scanned_by_token(inputs);
    EXPECT_LE(relative_error(ours, wanted), 1e-12);
    const auto weights = at::randn_like(wanted);
    const std::vector<at::Tensor> leaves{inputs.x, inputs.step, inputs.rate, inputs.b, inputs.c};
    const auto our_grads = torch::autograd::grad({ours}, leaves, {weights});
    const auto grads = torch::autograd::grad({wanted}, leaves, {weights});
    for (size_t i = 0; i < grads.size(); ++i)
      EXPECT_LE(relative_error(our_grads[i], grads[i]), 1e-9) << "gradient " << i;
  }
}

}  // namespace
}  // namespace megashard
