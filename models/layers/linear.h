#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/tensor_parallel_ranks.h"
#include "models/kernels/cross_entropy.h"
#include "models/kernels/float8_linear.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// A module with parameters that tensor-parallel ranks share.
class CutOverRanks {
 public:
  virtual ~CutOverRanks() = default;
  /// Calls set_tensor_parallel for the sharded parameters; the others are replicated.
  virtual void declare_cut(const DeviceMeshPtr& mesh) = 0;
};

/// Draws a weight of `whole` sizes, N(0, std), of which `weight` is this rank's shard along `dim`; an undefined weight
/// is one of other ranks, whose numbers are drawn and dropped. All ranks draw the same numbers.
void draw_weight(const at::Tensor& weight, at::IntArrayRef whole, int64_t dim, const TensorParallelRanks& ranks,
                 double std, const WeightInit& init);

/// y = x W^T + b. Unlike torch::nn::Linear it is created without values, which init_weights() or a checkpoint provides,
/// so that no unused random numbers are drawn. A sharded layer is initialised with its shard of the whole layer's
/// values.
class Linear : public torch::nn::Module, public SelfInitializing, public CutOverRanks {
 public:
  /// Sharding of the weight over tensor parallel ranks.
  enum class Cut {
    kNone,
    kOutputs,  ///< Megatron's ColumnParallelLinear: whole x, sharded y
    kInputs,   ///< RowParallelLinear: sharded x, y is hidden states (TensorParallelRanks::leave)
  };
  struct Options {
    int64_t in = 0;  ///< of the whole layer, like out
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< factor of the initialisation's std
    bool tied = false;      ///< the weight is shared with another module
    Cut cut = Cut::kNone;
    TensorParallelRanksPtr ranks{};  ///< with a cut
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]
  /// forward(swiglu(gate, up)) without saving its input (swiglu_linear), unless an adapter or fp8 needs it.
  at::Tensor forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up);
  /// LM head: vocab_parallel_cross_entropy of forward(x), x [..., in] and labels [...], without materialising all
  /// logits unless an adapter, bias or fp8 needs them. loss_weights, at_once: see linear_cross_entropy.
  TokenLosses token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                           std::optional<int64_t> at_once);
  void declare_cut(const DeviceMeshPtr& mesh) override;

  /// Adds a low-rank adapter: y + scale * lora_B(lora_A(dropout(x))), with lora_A [rank, in] initialised as torch's
  /// linear layers and lora_B [out, rank] zero (PEFT's LoraLayer).
  void add_adapter(int64_t rank, double scale, double dropout);
  /// True if forward(x) is only x W^T + b.
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
  /// Reduces a sharded layer's product without its bias.
  at::Tensor sum_over_ranks(const at::Tensor& partial) const;
  bool cuts_inputs() const { return cut_ == Cut::kInputs; }

  double init_scale_;
  bool tied_;
  Cut cut_;
  TensorParallelRanksPtr ranks_;
  std::optional<Float8Options> float8_{};
  double adapter_scale_ = 0, adapter_dropout_ = 0;
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;
};

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
