#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "models/kernels/cross_entropy.h"
#include "models/layers/parallel_linear.h"

namespace megashard {

/// The output projection of a language model, [..., in] -> logits [..., this rank's vocabulary].
class Head : public ColumnParallelLinear {
 public:
  /// `tied`: the weight is shared with the embeddings.
  Head(const Options& options, TensorParallelRanksPtr ranks, bool tied)
      : ColumnParallelLinear(options, std::move(ranks)), tied_(tied) {}

  at::Tensor forward(const at::Tensor& x);
  /// vocab_parallel_cross_entropy of forward(x), x [..., in] and labels [...], without materialising all logits if the
  /// head is plain and has no bias. loss_weights, at_once: see linear_cross_entropy.
  TokenLosses token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                           std::optional<int64_t> at_once);

 private:
  at::Tensor own_weight() const;

  bool tied_;
};

}  // namespace megashard
