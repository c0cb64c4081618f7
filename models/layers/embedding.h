#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/tensor_parallel_ranks.h"
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

}  // namespace megashard
