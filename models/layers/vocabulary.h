#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/tensor_parallel_ranks.h"
#include "models/kernels/cross_entropy.h"
#include "models/layers/parallel_linear.h"

namespace megashard {

/// Embedding table; created without values, as Linear. A padding row gets no gradient and is initialised with zeros.
/// With tensor parallel ranks each has a shard of the rows (Megatron's VocabParallelEmbedding).
class Embedding : public torch::nn::Module, public SelfInitializing, public CutOverRanks {
 public:
  Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index = std::nullopt,
            TensorParallelRanksPtr ranks = {});

  /// indices [...] int64 -> [..., width]; with ranks [B, T] -> hidden states (TensorParallelRanks::leave). On a CPU,
  /// throws an error that names an index outside the table.
  at::Tensor forward(const at::Tensor& indices);
  void declare_cut(const DeviceMeshPtr& mesh) override;
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Embedding"; }

  at::Tensor weight;  // [rows, width]

 private:
  int64_t rows_;
  int64_t first_row_ = 0;                 // of this rank
  std::optional<int64_t> padding_index_;  // within this rank's rows
  TensorParallelRanksPtr ranks_;          // may be null
};

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
