#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/layers/linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Whether a call of it is one of the layer's forward and nothing else: no hooks, such as a unit's or recompute's.
bool is_without_hooks(const Hooked<Linear>& layer);
/// Whether besides forward is x W^T + b and nothing else: no adapters or fp8.
bool is_plain(const Hooked<Linear>& layer);

/// Layers that take the same input, such as q_proj, k_proj and v_proj: modules of their own for names, checkpoints,
/// adapters and units, and one product where nothing is in the way.
class JointLinears {
 public:
  JointLinears() = default;
  /// Their weights will lie adjacent once their unit is gathered.
  explicit JointLinears(std::vector<std::shared_ptr<Hooked<Linear>>> layers);

  /// [..., in] -> [..., out] of each layer; of one product, columns of one tensor. Layers with hooks, adapters or fp8
  /// run one after the other.
  std::vector<at::Tensor> forward(const at::Tensor& x) const;
  const std::vector<std::shared_ptr<Hooked<Linear>>>& layers() const { return layers_; }

 private:
  std::vector<std::shared_ptr<Hooked<Linear>>> layers_;
};

}  // namespace megashard
