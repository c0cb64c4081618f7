#include "models/kernels/delta_rule.h"

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

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "models/kernels/causal_conv.h"

namespace megashard {
namespace {

constexpr at::ScalarType kDouble = at::kDouble;

/// Token by token.
at::Tensor by_recurrence(const DeltaRuleInputs& x) {
  const int64_t rows = x.v.size(0), length = x.v.size(1), heads = x.v.size(2), sharing = heads / x.k.size(2);
  const auto unit = [](const at::Tensor& each) { return each / (each.square().sum() + 1e-6).sqrt(); };
  std::vector<at::Tensor> results;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      auto state = at::zeros({x.k.size(3), x.v.size(3)}, kDouble);
      for (int64_t t = 0; t < length; ++t) {
        const auto of = [&](const at::Tensor& each, int64_t h) { return each[row][t][h]; };
        if (x.begins.defined() && x.begins[row][t].item<int64_t>() == t) state = at::zeros_like(state);
        const auto q = unit(of(x.q, head / sharing)) / std::sqrt(static_cast<double>(x.q.size(3)));
        const auto k = unit(of(x.k, head / sharing));
        state = state * of(x.decay, head).exp().unsqueeze(-1);  // of the head, or of each row
        state = state + at::outer(k, of(x.beta, head) * (of(x.v, head) - state.t().mv(k)));
        results.push_back(state.t().mv(q));
      }
    }
  }
  return at::stack(results).view({rows, heads, length, x.v.size(3)}).transpose(1, 2);
}

/// The largest difference, relative to the largest wanted value.
double error(const at::Tensor& ours, const at::Tensor& wanted) {
  return ((ours - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item<double>();
}

struct Case {
  int64_t rows, length, key_heads, value_heads, key_dim, value_dim;
  std::vector<int64_t> documents{};  // of each row; empty: one

  DeltaRuleInputs inputs(bool by_channel) const {
    at::manual_seed(static_cast<uint64_t>(length));
    const auto leaf = [](at::Tensor values) { return values.requires_grad_(); };
    const auto of_heads = [&](int64_t heads, int64_t dim) {
      return leaf(at::randn({rows, length, heads, dim}, kDouble));
    };
    DeltaRuleInputs x{.q = of_heads(key_heads, key_dim),
                      .k = of_heads(key_heads, key_dim),
                      .v = of_heads(value_heads, value_dim),
                      .decay = {},
                      .beta = leaf(at::rand({rows, length, value_heads}, kDouble)),
                      .begins = {}};
    std::vector<int64_t> decays{rows, length, value_heads};
    if (by_channel) decays.push_back(key_dim);
    x.decay = leaf(-2 * at::rand(decays, kDouble));
    if (documents.empty()) return x;
    x.begins = at::zeros({rows, length}, at::kLong);
    int64_t begin = 0;
    for (const int64_t each : documents) {
      x.begins.narrow(1, begin, each).fill_(begin);
      begin += each;
    }
    return x;
  }
};

void check_delta_rule(bool by_channel) {
  for (const Case& each : {Case{2, 5, 1, 1, 4, 3}, Case{1, 64, 2, 4, 6, 5}, Case{2, 131, 1, 3, 4, 8},
                           Case{2, 150, 2, 2, 5, 4, {1, 63, 70, 16}}, Case{1, 200, 1, 2, 4, 4, {130, 1, 1, 68}}}) {
    SCOPED_TRACE(each.length);
    const auto x = each.inputs(by_channel);
    const auto ours = gated_delta_rule(x), wanted = by_recurrence(x);
    EXPECT_LE(error(ours, wanted), 1e-12);
    const auto weights = at::randn_like(wanted);
    const std::vector<at::Tensor> inputs{x.q, x.k, x.v, x.decay, x.beta};
    const auto our_grads = torch::autograd::grad({ours}, inputs, {weights});
    const auto grads = torch::autograd::grad({wanted}, inputs, {weights});
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_LE(error(our_grads[i], grads[i]), 1e-9) << "gradient " << i;
  }
}

TEST(DeltaRule, IsItsRecurrence) { check_delta_rule(/*by_channel=*/false); }
TEST(DeltaRule, DecaysByChannel) { check_delta_rule(/*by_channel=*/true); }

/// fp32 has the CPU's own kernel, fp64 LibTorch's operators. Sums of a chunk's decays, here up to 128, are rounded to
/// 4e-6 at most in fp32, but tokens far apart count little.
TEST(DeltaRule, KernelHasTheOperatorsNumbers) {
  for (const Case& each : {Case{1, 1, 1, 1, 16, 16}, Case{2, 5, 1, 2, 4, 3}, Case{1, 128, 2, 4, 64, 64},
                           Case{2, 199, 2, 6, 64, 16}, Case{1, 333, 1, 1, 16, 64}, Case{1, 90, 2, 4, 128, 128},
                           Case{1, 70, 1, 2, 40, 24}, Case{2, 150, 2, 2, 16, 16, {1, 63, 70, 16}},
                           Case{1, 200, 1, 2, 64, 64, {130, 1, 1, 68}}, Case{1, 257, 2, 2, 20, 36, {64, 64, 65, 64}}}) {
    SCOPED_TRACE(each.length);
    const auto x = each.inputs(/*by_channel=*/false);
    const auto narrow = [](const at::Tensor& wide) { return wide.detach().to(at::kFloat).requires_grad_(); };
    const DeltaRuleInputs in_fp32{narrow(x.q), narrow(x.k), narrow(x.v), narrow(x.decay), narrow(x.beta), x.begins};
    const auto ours = gated_delta_rule(in_fp32), wanted = gated_delta_rule(x);
    EXPECT_LE(error(ours, wanted), 3e-6);
    const auto weights = at::randn_like(wanted);
    const auto our_grads = torch::autograd::grad({ours}, {in_fp32.q, in_fp32.k, in_fp32.v, in_fp32.decay, in_fp32.beta},
                                                 {weights.to(at::kFloat)});
    const auto grads = torch::autograd::grad({wanted}, {x.q, x.k, x.v, x.decay, x.beta}, {weights});
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_LE(error(our_grads[i], grads[i]), 3e-6) << "gradient " << i;
  }
}

TEST(CausalConv, IsTheSumOfItsTaps) {
  for (const int64_t width : {1, 3, 5}) {
    SCOPED_TRACE(width);
    at::manual_seed(static_cast<uint64_t>(width));
    const int64_t rows = 2, length = 7, channels = 19;
    const auto x = at::randn({rows, length, channels + 2}, kDouble).narrow(2, 1, channels).requires_grad_();
    const auto weight = at::randn({channels, width}, kDouble).requires_grad_();
    const auto begins = at::zeros({rows, length}, at::kLong);
    begins.narrow(1, 2, 5).fill_(2);
    for (const auto& documents : {at::Tensor(), begins}) {
      std::vector<at::Tensor> tokens;
      for (int64_t t = 0; t < length; ++t) {
        const int64_t first = documents.defined() && t >= 2 ? 2 : 0;
        auto sum = at::zeros({rows, channels}, kDouble);
        for (int64_t earlier = std::max(first, t - width + 1); earlier <= t; ++earlier)
          sum = sum + x.select(1, earlier) * weight.select(1, width - 1 - (t - earlier));
        tokens.push_back(sum);
      }
      const auto wanted = at::stack(tokens, 1), weights = at::randn_like(wanted);
      const auto grads = torch::autograd::grad({wanted}, {x, weight}, {weights});
      for (const auto& [dtype, bound] : {std::pair(at::kDouble, 1e-12), {at::kFloat, 1e-6}, {at::kBFloat16, 1e-2}}) {
        SCOPED_TRACE(dtype);
        const auto ours = causal_conv(x.to(dtype), weight.to(dtype), documents);
        EXPECT_LE(error(ours, wanted), bound);
        const auto our_grads = torch::autograd::grad({ours}, {x, weight}, {weights.to(dtype)});
        for (size_t i = 0; i < grads.size(); ++i) EXPECT_LE(error(our_grads[i], grads[i]), bound) << "gradient " << i;
      }
    }
  }
}

}  // namespace
}  // namespace megashard
