#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/config/tensor_parallel_ranks.h"
#include "models/layers/linear.h"
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

/// Layers with the same input, such as q_proj, k_proj and v_proj: separate modules for names, checkpoints, adapters and
/// units, but computed as one product if possible.
class JointLinears {
 public:
  using Layers = std::vector<std::shared_ptr<Hooked<ColumnParallelLinear>>>;

  JointLinears() = default;
  /// Declares the weights adjacent, so that their unit gathers them side by side.
  explicit JointLinears(Layers layers);

  /// [..., in] -> [..., out] of each layer, as columns of one tensor after one product. Layers that are not transparent
  /// or not plain, or whose weights are not adjacent, run separately.
  std::vector<at::Tensor> forward(const at::Tensor& x) const;

 private:
  Layers layers_;
};

}  // namespace megashard
