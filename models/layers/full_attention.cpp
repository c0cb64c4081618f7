#include "models/layers/full_attention.h"

#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <optional>

#include "models/kernels/fused_ops.h"
#include "models/layers/causal_attention.h"
#include "parallel/sequence_parallel/ring_attention.h"
#include "parallel/sequence_parallel/ulysses.h"

namespace megashard {
namespace {

at::Tensor by_library(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_mask) {
  const auto heads_first = [by_fp32 = by_way_of_fp32(q)](const at::Tensor& each) {
    return (by_fp32 ? each.to(at::kFloat) : each).transpose(1, 2);
  };
  std::optional<at::Tensor> allowed;
  if (key_mask.defined()) allowed = key_mask.unsqueeze(1).unsqueeze(1);  // kernels repeat it for heads and queries
  return at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), allowed)
      .transpose(1, 2)
      .to(q.scalar_type());
}

/// Attends from all rows of whole sequences to all keys.
at::Tensor attend_all(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_mask) {
  if (key_mask.defined() || !has_fused_attention(q)) return by_library(q, k, v, key_mask);
  const int64_t length = k.size(1);
  const auto ends = at::full({q.size(0), length}, length, at::TensorOptions(at::kLong).device(q.device()));
  return fused_attention(q, k, v, {.key_ends = ends}, 1 / std::sqrt(static_cast<double>(q.size(3))));
}

}  // namespace

at::Tensor full_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_mask) {
  return by_library(q, k, v, key_mask);
}

at::Tensor full_self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& key_mask, const SequenceShard& sequence) {
  const SequenceShard rows = sequence.of_place();
  const auto whole = gather_sequence({q, k, v}, rows);
  if (!sequence.ring) return scatter_sequence(attend_all(whole[0], whole[1], whole[2], key_mask), rows);
  const auto computed = [by_fp32 = by_way_of_fp32(q)](const at::Tensor& x) { return by_fp32 ? x.to(at::kFloat) : x; };
  const RingMask mask{.causal = false, .keys = key_mask};
  const auto mixed =
      ring_attention(computed(whole[0]), computed(whole[1]), computed(whole[2]), mask, std::nullopt, sequence);
  return scatter_sequence(mixed.to(q.scalar_type()), rows);
}

}  // namespace megashard
