#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/layers/linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// True if it is transparent and forward is only x W^T + b: no adapter, fp8, tied weight or reduction over ranks.
bool is_plain(const Hooked<Linear>& layer);

/// Layers with the same input, such as q_proj, k_proj and v_proj: separate modules for names, checkpoints, adapters and
/// units, but computed as one product if possible.
class JointLinears {
 public:
  JointLinears() = default;
  /// Declares the weights adjacent, so that their unit gathers them side by side.
  explicit JointLinears(std::vector<std::shared_ptr<Hooked<Linear>>> layers);

  /// [..., in] -> [..., out] of each layer, as columns of one tensor after one product. Layers that are not plain, or
  /// whose weights are not adjacent, run separately.
  std::vector<at::Tensor> forward(const at::Tensor& x) const;
  const std::vector<std::shared_ptr<Hooked<Linear>>>& layers() const { return layers_; }

 private:
  std::vector<std::shared_ptr<Hooked<Linear>>> layers_;
};

}  // namespace megashard
