#include "models/layers/capped_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "models/kernels/fused_ops.h"
#include "models/kernels/once_differentiable.h"

namespace megashard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Queries [first, first + queries) of rows and the keys [first_key, first_key + keys) that some of them see.
struct CappedBlock {
  int64_t first, queries, first_key, keys;
};

/// Blocks of the documents in order. Documents of one batch row lie one after the other in dimension 1.
std::vector<CappedBlock> blocks_of(at::IntArrayRef documents, int64_t window) {
  constexpr int64_t kMostQueries = 256;
  std::vector<CappedBlock> blocks;
  int64_t begin = 0;
  for (const int64_t length : documents) {
    for (int64_t first = begin; first < begin + length; first += kMostQueries) {
      const int64_t end = std::min(first + kMostQueries, begin + length);
      const int64_t key = window == 0 ? begin : std::max(begin, first - window + 1);
      blocks.push_back({first, end - first, key, end - key});
    }
    begin += length;
  }
  return blocks;
}

/// Queries [B, T, H, D] as rows [B, G, H / G * T, D] of the heads of keys.
at::Tensor rows_of_groups(const at::Tensor& x, int64_t groups) {
  return x.unflatten(2, {groups, -1}).permute({0, 2, 3, 1, 4}).flatten(2, 3);
}

/// Reverses rows_of_groups.
at::Tensor heads_of_groups(const at::Tensor& rows, int64_t queries) {
  return rows.unflatten(2, {-1, queries}).permute({0, 3, 1, 2, 4}).flatten(2, 3);
}

/// fp32 for 16-bit heads.
at::ScalarType dtype_of_scores(const at::Tensor& q) { return c10::promoteTypes(q.scalar_type(), at::kFloat); }

/// tanh(score / c) and the softmax of the scores, [B, G, H / G * queries, keys].
struct CappedScores {
  at::Tensor tanh, weights;
};

struct CapAndScale {
  double cap, scale;
  int64_t window;

  /// q, k: of the block, as rows of the heads of keys.
  CappedScores scores(const at::Tensor& q, const at::Tensor& k, const CappedBlock& block) const {
    const auto options = q.options().dtype(at::kLong);
    const auto query = at::arange(block.first, block.first + block.queries, options).unsqueeze(1);
    const auto key = at::arange(block.first_key, block.first_key + block.keys, options);
    auto hidden = key.gt(query);
    if (window > 0) hidden = hidden.logical_or(key.le(query - window));
    const auto products = at::matmul(q, k.transpose(2, 3));
    const auto tanh = at::tanh(products.to(dtype_of_scores(q)) * (scale / cap));
    const auto seen = (tanh * cap)
                          .unflatten(2, {-1, block.queries})
                          .masked_fill(hidden, -std::numeric_limits<double>::infinity())
                          .flatten(2, 3);
    return {tanh, at::softmax(seen, -1)};
  }
};

/// The keys or values of a block as rows [B, G, keys, D].
at::Tensor keys_of(const at::Tensor& x, const CappedBlock& block) {
  return x.narrow(1, block.first_key, block.keys).transpose(1, 2);
}
at::Tensor queries_of(const at::Tensor& x, const CappedBlock& block, int64_t groups) {
  return rows_of_groups(x.narrow(1, block.first, block.queries), groups);
}

at::Tensor mixed_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::vector<CappedBlock>& blocks, const CapAndScale& how, double dropout) {
  std::vector<at::Tensor> mixed;
  for (const auto& block : blocks) {
    auto weights = how.scores(queries_of(q, block, k.size(2)), keys_of(k, block), block).weights.to(q.scalar_type());
    if (dropout > 0) weights = at::dropout(weights, dropout, /*train=*/true);
    mixed.push_back(heads_of_groups(at::matmul(weights, keys_of(v, block)), block.queries));
  }
  return at::cat(mixed, 1);
}

struct CappedAttentionFunction : Function<CappedAttentionFunction> {
  static Variable forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::vector<int64_t>& documents, const CapAndScale& how) {
    context->save_for_backward({q, k, v});
    context->saved_data["documents"] = documents;
    context->saved_data["how"] = std::vector<double>{how.cap, how.scale, static_cast<double>(how.window)};
    return mixed_blocks(q, k, v, blocks_of(documents, how.window), how, /*dropout=*/0);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("capped attention");
    const auto saved = context->get_saved_variables();
    const auto numbers = context->saved_data["how"].toDoubleVector();
    const CapAndScale how{numbers[0], numbers[1], static_cast<int64_t>(numbers[2])};
    const auto &q = saved[0], &k = saved[1], &v = saved[2];
    const auto dtype = q.scalar_type();
    std::vector<at::Tensor> grad_q;
    const auto grad_k = at::zeros_like(k, k.options().dtype(dtype_of_scores(q))), grad_v = at::zeros_like(grad_k);
    for (const auto& block : blocks_of(context->saved_data["documents"].toIntVector(), how.window)) {
      const auto queries = queries_of(q, block, k.size(2)), keys = keys_of(k, block);
      const auto grad = queries_of(grads[0], block, k.size(2));
      const auto [tanh, weights] = how.scores(queries, keys, block);
      const auto of_weights = at::matmul(grad, keys_of(v, block).transpose(2, 3)).to(dtype_of_scores(q));
      const auto products = weights * of_weights;
      const auto of_scores = products - weights * products.sum(-1, /*keepdim=*/true);
      const auto of_products = (of_scores * (1 - tanh.square()) * how.scale).to(dtype);
      grad_q.push_back(heads_of_groups(at::matmul(of_products, keys), block.queries));
      keys_of(grad_k, block).add_(at::matmul(of_products.transpose(2, 3), queries));
      keys_of(grad_v, block).add_(at::matmul(weights.to(dtype).transpose(2, 3), grad));
    }
    return {at::cat(grad_q, 1), grad_k.to(dtype), grad_v.to(dtype), Variable(), Variable()};
  }
};

}  // namespace

at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KeySpan& span,
                            const AttentionOptions& options) {
  if (by_way_of_fp32(q))
    return capped_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), span, options).to(q.scalar_type());
  const CapAndScale how{options.softcap, options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
                        span.window};
  // Documents are of all rows, concatenated.
  const auto in_one_row = [&](const at::Tensor& x) { return span.documents ? x.flatten(0, 1).unsqueeze(0) : x; };
  const auto documents = span.documents ? span.documents->lengths : std::vector{q.size(1)};
  const auto queries = in_one_row(q), keys = in_one_row(k), values = in_one_row(v);
  const auto mixed = options.dropout > 0
                         ? mixed_blocks(queries, keys, values, blocks_of(documents, how.window), how, options.dropout)
                         : CappedAttentionFunction::apply(queries, keys, values, documents, how);
  return mixed.view({q.size(0), q.size(1), q.size(2), v.size(3)});
}

}  // namespace megashard
