#include "framework/modules/shard_placement.h"

#include <c10/util/StringUtil.h>

#include "framework/mistakes.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard::detail {

void ShardPlacements::cut(const torch::nn::Module& module, int64_t dim) {
  for (const auto& parameter : module.parameters()) dims_[parameter.unsafeGetTensorImpl()] = dim;
}

void ShardPlacements::set_other_mesh(DeviceMeshPtr mesh, std::function<bool(const at::Tensor& parameter)> which) {
  other_mesh_ = std::move(mesh);
  which_ = std::move(which);
}

int ShardPlacements::ranks_of(const at::Tensor& parameter) const {
  const DeviceMesh& mesh = is_on_other_mesh(parameter) ? *other_mesh_ : *mesh_;
  return mesh.size(mesh.ndim() - 1);  // earlier dimensions are replicas
}

int64_t ShardPlacements::dim_of(const at::Tensor& parameter) const {
  if (const auto asked = dims_.find(parameter.unsafeGetTensorImpl()); asked != dims_.end()) {
    const int64_t dim = asked->second < 0 ? asked->second + parameter.dim() : asked->second;
    return 0 <= dim && dim < parameter.dim() ? dim : 0;
  }
  if (!divisible_) return 0;
  for (int64_t dim = 0; dim < parameter.dim(); ++dim) {
    if (parameter.size(dim) % ranks_of(parameter) == 0) return dim;
  }
  return 0;
}

ShardPlacement ShardPlacements::operator()(const at::Tensor& parameter) const {
  const auto* tensor = parameter.unsafeGetTensorImpl();
  const bool is_stack = stacks_.contains(tensor) && !dims_.contains(tensor) && !divisible_;
  return {.dim = dim_of(parameter),
          .leading_dims = is_stack ? leading_dims_for(parameter.sizes(), ranks_of(parameter)) : 1,
          .mesh = is_on_other_mesh(parameter) ? other_mesh_ : nullptr};
}

void ShardPlacements::check(const std::string& name, const at::Tensor& parameter) const {
  const int64_t dim = dim_of(parameter);
  require(dim == 0 || parameter.size(dim) % ranks_of(parameter) == 0,
          c10::str("shard_placement in the FSDP2 file cuts ", name, " of sizes ", parameter.sizes(),
                   " along dimension ", dim, ", which the ", ranks_of(parameter),
                   " ranks that share it do not divide; choose another dimension, or auto."));
}

}  // namespace megashard::detail
