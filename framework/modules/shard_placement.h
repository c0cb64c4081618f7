#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <unordered_map>

#include "framework/modules/fsdp2_config.h"
#include "framework/modules/module_patterns.h"

namespace megashard::detail {

/// Where each parameter of a model is cut: along which dimension (shard_placement of the FSDP2 file), and over which
/// ranks (experts have their own).
class ShardPlacements {
 public:
  /// Of the model's ranks, along dimension 0.
  explicit ShardPlacements(DeviceMeshPtr mesh = {}) : mesh_(std::move(mesh)) {}

  void cut_where_divisible() { divisible_ = true; }
  /// All parameters of the module that have the dimension.
  void cut(const torch::nn::Module& module, int64_t dim);
  /// The parameters that `which` says are on these ranks.
  void set_other_mesh(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which);
  bool is_on_other_mesh(const at::Tensor& parameter) const { return which_ && which_(parameter); }
  bool has_other_mesh() const { return which_ != nullptr; }

  /// For FullyShardOptions::shard_placement_fn.
  ShardPlacement operator()(const at::Tensor& parameter) const;
  /// Throws UsageError for a parameter whose dimension the ranks do not divide.
  void check(const std::string& name, const at::Tensor& parameter) const;

 private:
  int ranks_of(const at::Tensor& parameter) const;
  int64_t dim_of(const at::Tensor& parameter) const;

  DeviceMeshPtr mesh_, other_mesh_;
  std::function<bool(const at::Tensor& parameter)> which_;  // null: none is on other_mesh_
  bool divisible_ = false;
  std::unordered_map<const c10::TensorImpl*, int64_t> dims_;
};

}  // namespace megashard::detail
