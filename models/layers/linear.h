#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/tensor_parallel_ranks.h"
#include "models/kernels/float8_linear.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// y = x W^T + b. Unlike torch::nn::Linear it starts without values: init_weights() or a checkpoint
/// gives them, and a start does not pay for random numbers that nobody reads. A layer that is cut
/// starts with its piece of what the whole one starts with.
class Linear : public torch::nn::Module, public SelfInitializing {
 public:
  /// How the weight is cut over tensor-parallel ranks.
  enum class Cut {
    kNone,
    kOutputs,  ///< Megatron's ColumnParallelLinear: x is whole, y this rank's piece
    kInputs,   ///< RowParallelLinear: x is this rank's piece, y hidden states (TensorParallelRanks::leave)
    kInputsOfSums,  ///< the same, but y is this rank's part of the sums; without a bias
  };
  struct Options {
    int64_t in = 0;   ///< of the whole layer, as out
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< on the std of the initialisation
    bool tied = false;      ///< the weight is another module's, too
    Cut cut = Cut::kNone;
    TensorParallelRanksPtr ranks{};  ///< with a cut
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]
  /// forward(swiglu(gate, up)), whose input is not kept (swiglu_linear) where neither adapter nor fp8 needs it.
  at::Tensor forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up);
  /// Of a language model's head: what vocab_parallel_cross_entropy makes of forward(x), x [..., in] and labels [...],
  /// without all logits at a time where neither adapter, bias nor fp8 needs them. loss_weights: linear_cross_entropy's.
  at::Tensor token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights);
  /// set_tensor_parallel of what is cut.
  void declare_cut(const DeviceMeshPtr& mesh);

  /// Low-rank adapters: y + scale * lora_B(lora_A(dropout(x))), with lora_A [rank, in] as torch
  /// starts a linear layer and lora_B [out, rank] zero (PEFT's LoraLayer).
  void add_adapter(int64_t rank, double scale, double dropout);
  /// Whether forward(x) is x W^T + b and nothing else.
  bool is_plain() const { return !has_adapter() && !float8_ && !tied_ && cut_ != Cut::kInputs; }
  bool has_adapter() const { return lora_a_ != nullptr; }
  double adapter_scale() const { return adapter_scale_; }
  const at::Tensor& lora_a() const { return lora_a_->weight; }
  const at::Tensor& lora_b() const { return lora_b_->weight; }
  void compute_in_float8(const Float8Options& options) { float8_ = options; }
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 private:
  at::Tensor product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const;
  /// What becomes of a cut layer's product without its bias.
  at::Tensor sum_over_ranks(const at::Tensor& partial) const;
  bool cuts_inputs() const { return cut_ == Cut::kInputs || cut_ == Cut::kInputsOfSums; }

  double init_scale_;
  bool tied_;
  Cut cut_;
  TensorParallelRanksPtr ranks_;
  std::optional<Float8Options> float8_{};
  double adapter_scale_ = 0, adapter_dropout_ = 0;
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;
};

/// Rows of a table; starts without values, as Linear. A padding row gets no gradient and starts at
/// zero. With tensor-parallel ranks each has a piece of the rows (Megatron's VocabParallelEmbedding).
class Embedding : public torch::nn::Module, public SelfInitializing {
 public:
  Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index = std::nullopt,
            TensorParallelRanksPtr ranks = {});

  /// indices [...] int64 -> [..., width]; with ranks [B, T] -> hidden states (TensorParallelRanks::leave).
  /// On a CPU, an index outside the table is an error that names it.
  at::Tensor forward(const at::Tensor& indices);
  void declare_cut(const DeviceMeshPtr& mesh);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Embedding"; }

  at::Tensor weight;  // [rows, width]

 private:
  int64_t rows_;
  int64_t first_row_ = 0;                // of this rank's
  std::optional<int64_t> padding_index_;  // among these
  TensorParallelRanksPtr ranks_;          // or null
};

}  // namespace megashard
