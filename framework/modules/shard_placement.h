#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"

namespace megashard::detail {

/// Placement of each parameter of a model: the dimension (shard_placement of the FSDP2 file) and the ranks (experts
/// have their own) over which it is sharded.
class ShardPlacements {
 public:
  /// Default: over the model's ranks, along dimension 0.
  explicit ShardPlacements(DeviceMeshPtr mesh = {}) : mesh_(std::move(mesh)) {}

  void cut_where_divisible() { divisible_ = true; }
  /// Sets the dimension of the module's parameters that have it.
  void cut(const torch::nn::Module& module, int64_t dim);
  /// Uses `mesh` for parameters selected by `which`.
  void set_other_mesh(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which);
  /// These stack matrices over their leading dimensions: where dimension 0 does not divide, ranks get parts of one.
  void set_stacks(std::unordered_set<const c10::TensorImpl*> stacks) { stacks_ = std::move(stacks); }
  bool has_stacks() const { return !stacks_.empty(); }
  bool is_on_other_mesh(const at::Tensor& parameter) const { return which_ && which_(parameter); }
  bool has_other_mesh() const { return which_ != nullptr; }

  /// Function for FullyShardOptions::shard_placement_fn.
  ShardPlacement operator()(const at::Tensor& parameter) const;
  /// Throws UsageError if the ranks do not divide the parameter's dimension.
  void check(const std::string& name, const at::Tensor& parameter) const;

 private:
  int ranks_of(const at::Tensor& parameter) const;
  int64_t dim_of(const at::Tensor& parameter) const;

  DeviceMeshPtr mesh_, other_mesh_;
  std::function<bool(const at::Tensor& parameter)> which_;  // null: no parameter uses other_mesh_
  bool divisible_ = false;
  std::unordered_set<const c10::TensorImpl*> stacks_;
  std::unordered_map<const c10::TensorImpl*, int64_t> dims_;
};

}  // namespace megashard::detail
