#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/layers/parallel_linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

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
