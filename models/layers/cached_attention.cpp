#include "models/layers/cached_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <limits>

namespace megashard {
namespace {

/// [B, T, N]: true for keys that a query sees.
at::Tensor seen_keys(const CachedKeys& cached) {
  const auto own = cached.places.unsqueeze(-1);
  const auto keys = at::arange(cached.keys.size(1), cached.places.options());
  auto seen = keys.le(own);
  if (cached.window > 0) seen = seen.logical_and(keys.gt(own - cached.window));
  if (cached.chunk > 0) seen = seen.logical_and(keys.ge(own.div(cached.chunk, "floor") * cached.chunk));
  return seen;
}

}  // namespace

at::Tensor cached_attention(const at::Tensor& q, const CachedKeys& cached, const AttentionOptions& options) {
  const int64_t tokens = q.size(1), groups = cached.keys.size(2), queries = q.size(2) / groups;
  const auto computed_in = c10::promoteTypes(q.scalar_type(), at::kFloat);
  const auto heads_first = [&](const at::Tensor& x) { return x.transpose(1, 2).to(computed_in); };
  const auto rows = heads_first(q).unflatten(1, {groups, queries}).flatten(2, 3);  // [B, G, queries * T, D]
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  auto scores = at::matmul(rows, heads_first(cached.keys).transpose(2, 3)) * scale;
  if (options.softcap > 0) scores = at::tanh(scores / options.softcap) * options.softcap;
  const auto hidden = seen_keys(cached).logical_not().unsqueeze(1).unsqueeze(1);  // [B, 1, 1, T, N]
  scores = scores.unflatten(2, {queries, tokens}).masked_fill(hidden, -std::numeric_limits<double>::infinity());
  if (options.sinks.defined()) {
    const auto sinks = options.sinks.to(computed_in).view({1, groups, queries, 1, 1});
    scores = at::cat({scores, sinks.expand({q.size(0), groups, queries, tokens, 1})}, -1);
  }
  const auto weights = at::softmax(scores, -1).narrow(-1, 0, cached.keys.size(1)).flatten(2, 3);
  return at::matmul(weights, heads_first(cached.values))
      .unflatten(2, {queries, tokens})
      .flatten(1, 2)
      .transpose(1, 2)
      .to(q.scalar_type());
}

}  // namespace megashard
