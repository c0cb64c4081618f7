#pragma once

#include <ATen/Functions.h>

#include <cmath>
#include <limits>
#include <optional>

namespace megashard::testing {

struct Heads {
  at::Tensor q, k, v;  ///< [B, T, heads, D]; the number of heads of k and v divides that of q
};

/// Attention by the formula, in the dtype of the heads. seen [T, T]: the keys that each query sees. softcap c:
/// c tanh(score / c) instead of a score; 0: none.
inline at::Tensor attention_by_formula(const Heads& x, const at::Tensor& seen, std::optional<double> scale,
                                       double softcap = 0) {
  const auto heads_first = [&](const at::Tensor& each) {
    return each.transpose(1, 2).repeat_interleave(x.q.size(2) / each.size(2), 1);
  };
  at::Tensor scores = at::matmul(heads_first(x.q), heads_first(x.k).transpose(2, 3)) *
                      scale.value_or(1 / std::sqrt(static_cast<double>(x.q.size(3))));
  if (softcap > 0) scores = at::tanh(scores / softcap) * softcap;
  const at::Tensor lowest = at::full({}, -std::numeric_limits<double>::infinity(), scores.options());
  const at::Tensor weights = at::softmax(at::where(seen.to(scores.device()), scores, lowest), -1);
  return at::matmul(weights, heads_first(x.v)).transpose(1, 2);
}

}  // namespace megashard::testing
