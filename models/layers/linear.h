#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/tensor_parallel_ranks.h"
#include "models/kernels/cross_entropy.h"
#include "models/kernels/head_outputs.h"
#include "models/layers/linear_layers.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// y = x W^T + b. Unlike torch::nn::Linear it is created without values, which init_weights() or a checkpoint provides,
/// so that no unused random numbers are drawn.
class Linear : public torch::nn::Module, public SelfInitializing, public LinearLayers {
 public:
  struct Options {
    int64_t in = 0;
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< factor of the initialisation's std
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]
  /// forward(swiglu(gate, up)) without saving its input (swiglu_linear) if the layer is plain.
  at::Tensor forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up);

  /// True if it computes x W^T + b alone, so that its product may be fused with others.
  bool is_plain() const { return compute_ == nullptr && lora_a_ == nullptr; }
  std::vector<Layer> linear_layers() const override;
  bool has_adapters() const override { return lora_a_ != nullptr; }
  void set_compute(std::shared_ptr<LinearCompute> compute) override { compute_ = std::move(compute); }
  void add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) override;
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 protected:
  at::Tensor product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const;
  double init_scale() const { return init_scale_; }

 private:
  double init_scale_;
  std::shared_ptr<LinearCompute> compute_;
  LowRankAdapter adapter_;
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;  // null: no adapter
};

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

/// A linear layer whose outputs tensor-parallel ranks share (Megatron's ColumnParallelLinear): whole x -> this rank's
/// y. `options`: sizes of the whole layer.
class ColumnParallelLinear : public Linear, public CutOverRanks {
 public:
  ColumnParallelLinear(const Options& options, TensorParallelRanksPtr ranks);
  void declare_cut(const DeviceMeshPtr& mesh) override;
  void init_own_weights(const WeightInit& init) override;

 protected:
  const TensorParallelRanksPtr& ranks() const { return ranks_; }

 private:
  TensorParallelRanksPtr ranks_;
};

/// A linear layer whose inputs tensor-parallel ranks share (Megatron's RowParallelLinear): this rank's x -> hidden
/// states (TensorParallelRanks::leave). `options`: sizes of the whole layer.
class RowParallelLinear : public Linear, public CutOverRanks {
 public:
  RowParallelLinear(const Options& options, TensorParallelRanksPtr ranks);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up);
  void declare_cut(const DeviceMeshPtr& mesh) override;
  void init_own_weights(const WeightInit& init) override;

 private:
  /// The hidden states of a product without its bias.
  at::Tensor sum_over_ranks(const at::Tensor& partial) const;

  TensorParallelRanksPtr ranks_;
};

/// A linear layer that each tensor-parallel rank has as a whole: this rank's hidden states -> their outputs.
class ReplicatedLinear : public Linear {
 public:
  ReplicatedLinear(const Options& options, TensorParallelRanksPtr ranks) : Linear(options), ranks_(std::move(ranks)) {}
  at::Tensor forward(const at::Tensor& x);

 private:
  TensorParallelRanksPtr ranks_;
};

/// True if JointLinears can use one product: weights of x's dtype that are adjacent in memory
/// (parallel/fsdp/adjacent_parameters.h).
bool can_join(const at::Tensor& x, at::TensorList weights);

/// Layers with the same input, such as q_proj, k_proj and v_proj: separate modules for names, checkpoints, adapters and
/// units, but computed as one product if possible.
class JointLinears {
 public:
  using Layers = std::vector<std::shared_ptr<Hooked<ColumnParallelLinear>>>;

  JointLinears() = default;
  /// Declares the weights adjacent, so that their unit gathers them side by side.
  explicit JointLinears(Layers layers);

  /// [..., in] -> [..., out] of each layer. After one product they are columns of one tensor, which autograd does not
  /// track as views; gradients that are such columns are not copied. Layers that are not transparent or not plain, or
  /// whose weights are not adjacent, run separately.
  std::vector<at::Tensor> forward(const at::Tensor& x) const;

 private:
  Layers layers_;
};

/// As a weight of that dtype holds it: sqrt(1152) is 34 in bf16.
double rounded(double value, at::ScalarType dtype);

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
  /// `tied`: the weight is shared with the embeddings. `softcap`: caps the logits (soft_capped).
  Head(const Options& options, TensorParallelRanksPtr ranks, bool tied, double softcap = 0)
      : ColumnParallelLinear(options, std::move(ranks)), tied_(tied), softcap_(softcap) {}

  at::Tensor forward(const at::Tensor& x);
  /// vocab_parallel_cross_entropy of forward(x), x [..., in] and labels [...], without materialising all logits if the
  /// head is plain and has no bias. loss_weights, at_once: see linear_cross_entropy.
  TokenLosses token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                           std::optional<int64_t> at_once);
  /// linear_head_outputs of x. Throws if the head has adapters, another compute or a bias.
  HeadOutputs outputs(const at::Tensor& x, const HeadQuestion& question, std::optional<int64_t> at_once);

 private:
  at::Tensor own_weight() const;

  bool tied_;
  double softcap_;
};

/// One number for each hidden state: transformers' `score` of a classifier with one label. [..., in] -> [...] fp32.
class ScoreHead : public torch::nn::Module, public SelfInitializing {
 public:
  explicit ScoreHead(int64_t in);

  at::Tensor forward(const at::Tensor& x);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [1, in]
};

}  // namespace megashard
