#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/device/streams.h"
#include "parallel/device/torch_versions.h"
#include "parallel/fsdp/custom_comm.h"
#include "parallel/fsdp/detail/shard_geometry.h"
#include "parallel/fsdp/detail/unsharded_storage.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"
#include "parallel/tensor_parallel_layout.h"

namespace torch::autograd {
struct Node;
}

namespace megashard {

class FsdpParamGroup;

/// Ranks that hold a parameter: sharded over one group, replicated over another (HSDP) or none.
struct ShardLayout {
  DeviceMeshPtr mesh;
  ProcessGroupPtr shard_group;
  ProcessGroupPtr replicate_group;  // null: no replicas
};

/// One parameter under fully_shard (FSDPParam). Its TensorImpl always stays the module's; TensorImpl::shallow_copy_from
/// switches it between the sharded parameter (local rows, stored dtype, guarded; what optimizers see) and the unsharded
/// one (compute dtype). See docs/parameter_identity.md.
class FsdpParam {
 public:
  FsdpParam(at::Tensor parameter, std::string name, const ShardLayout& layout, FsdpParamGroup* group,
            const FullyShardOptions& options);
  ~FsdpParam();
  FsdpParam(const FsdpParam&) = delete;
  FsdpParam& operator=(const FsdpParam&) = delete;

  const std::string& name() const { return info_->name; }
  void set_name(const std::string& name);
  const at::Tensor& parameter() const { return parameter_; }
  FsdpParamGroup* group() const { return group_; }
  void set_group(FsdpParamGroup* group) { group_ = group; }
  const at::Tensor& sharded_param() const { return sharded_param_; }  ///< local rows, unguarded; possibly none
  /// Local rows on the mesh's device; under CPU offload an asynchronous copy on the current stream.
  at::Tensor sharded_param_on_device() const;
  /// Geometry of the unsharded parameter (under tensor parallelism: of this rank's piece).
  const ShardGeometry& geometry() const { return geometry_; }
  at::ScalarType stored_dtype() const { return sharded_param_.scalar_type(); }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  bool trainable() const { return parameter_.requires_grad(); }
  bool is_meta() const { return sharded_param_.is_meta(); }
  ShardedTensor sharded_tensor() const;  ///< local rows and their place in the whole model's weight
  /// sharding_groups() of sharded_tensor().
  const std::vector<ProcessGroupPtr>& sharding_groups() const { return sharding_groups_; }

  bool has_own_grad_dtype() const { return policy_.grad_dtype.has_value(); }
  at::ScalarType reduced_dtype() const;  ///< dtype of its gradient's reduction if the policy has no reduce_dtype
  /// Fixes the compute dtype and creates the unsharded storage; keeps an existing one that still fits, because live
  /// graphs hold views of it. Called before the first all-gather and when reset_sharded_param returns true.
  void init_unsharded(std::optional<at::ScalarType> param_dtype);
  void set_extension(std::shared_ptr<AllGatherExtension> extension) { extension_ = std::move(extension); }
  AllGatherExtension* extension() const { return extension_.get(); }
  UnshardedStorage& unsharded() { return unsharded_; }
  const UnshardedStorage& unsharded() const { return unsharded_; }
  /// True if the unsharded parameter is the sharded one: one rank holds all rows in the compute dtype.
  bool aliases_sharded_param() const { return aliases_sharded_param_; }

  /// Adopts changes made by Module::to, set_data or a load: new local rows or a new whole parameter; throws for
  /// anything else. Returns true if the dtype differs from the one init_unsharded saw. Sharded state only.
  bool reset_sharded_param();
  void to_unsharded();    ///< call after the unsharded storage was filled
  void to_sharded();      ///< does not free the unsharded storage
  void free_unsharded();  ///< to_sharded, then frees it
  bool is_unsharded() const { return is_unsharded_; }
  bool changed_while_unsharded() const;  ///< true after an in-place change of the parameter itself

  /// Copies this rank's rows of the full parameter (or of its tensor-parallel piece); allocates a meta one first.
  void assign_full(const at::Tensor& full);
  void materialise_empty(c10::Device device);  ///< meta only; contents undefined

  // Gradients. In backward parameter().grad() is the unsharded gradient; the sharded one is set aside here.
  void set_aside_sharded_grad();
  /// Returns the gradient accumulated by backward (undefined if none) and restores the sharded gradient.
  at::Tensor take_unsharded_grad();
  /// Unreduced, in the reduce dtype; accumulated by backwards without sync.
  at::Tensor& unsharded_accumulated_grad() { return unsharded_accumulated_grad_; }
  /// Adds the local rows at `offset` of a reduced 1-D buffer, cast to the gradient's dtype (on a device, widened in the
  /// addition). Without a gradient so far, it may become a view of the buffer.
  void accumulate_sharded_grad(const at::Tensor& buffer, int64_t offset);
  /// True if rows of such a buffer become the gradient as they are. Same on all ranks.
  bool takes_reduced_rows(const at::Tensor& buffer) const;
  /// True if a gradient exists on a device, to which rows are added.
  bool adds_on_device() const;
  void wait_for_offloaded_grad();  ///< blocks the host; no-op without CPU offload
  void add_grad_hook(std::function<void(const at::Tensor&)> hook) { grad_hooks_.push_back(std::move(hook)); }
  bool has_grad_hooks() const { return !grad_hooks_.empty(); }
  void run_grad_hooks();

 private:
  void bind_sharded_param(const at::Tensor& local);
  void check_grad_dtype() const;
  at::Tensor part_of(const at::Tensor& full) const;
  at::Tensor rows_of(const at::Tensor& full) const;
  c10::Device sharded_device() const;
  bool pins_host_memory() const;
  at::ScalarType grad_dtype() const { return policy_.grad_dtype.value_or(stored_dtype()); }
  const at::Tensor& sharded_grad() const { return sharded_grad_is_aside_ ? sharded_grad_ : parameter_.grad(); }
  at::Tensor to_stored_grad(const at::Tensor& rows, bool adds);
  void switch_to(const at::Tensor& tensor);
  void install_accumulator();
  void remove_accumulator();

  at::Tensor parameter_;
  FsdpParamGroup* group_;
  ShardLayout layout_;
  TensorParallelLayouts tensor_parallel_;  // empty: the parameter is whole
  DeviceMeshPtr joint_mesh_;               // including the tensor-parallel dimension
  std::vector<ProcessGroupPtr> sharding_groups_;
  c10::intrusive_ptr<GuardInfo> info_;
  c10::intrusive_ptr<GuardInfo> grad_info_;
  MixedPrecisionPolicy policy_;
  std::optional<at::ScalarType> dtype_override_;
  std::optional<CpuOffloadPolicy> offload_;
  ShardGeometry geometry_;
  int rank_ = 0;
  std::shared_ptr<AllGatherExtension> extension_;
  at::Tensor sharded_param_;          // [local rows, ...]
  at::Tensor guarded_sharded_param_;  // same storage; the parameter's tensor while sharded
  at::ScalarType compute_dtype_ = at::kFloat;
  UnshardedStorage unsharded_;
  std::optional<at::ScalarType> stored_dtype_seen_;  // seen by init_unsharded
  bool aliases_sharded_param_ = false;
  bool is_unsharded_ = false;
  int64_t version_when_unsharded_ = 0;
  bool sharded_grad_is_aside_ = false;
  at::Tensor sharded_grad_;  // set aside
  at::Tensor unsharded_accumulated_grad_;
  StreamEvent offloaded_grad_;  // recorded after its copy to the host
  std::vector<std::function<void(const at::Tensor&)>> grad_hooks_;
  NodePtr accumulator_;             // the only AccumulateGrad, of the unsharded shape
  uintptr_t accumulator_hook_ = 0;  // reports to the group that the gradient is complete
};

using FsdpParams = std::vector<std::unique_ptr<FsdpParam>>;

/// Places unsharded storages of each keep_adjacent list in one memory block where possible.
void place_adjacent(const FsdpParams& params);

/// FsdpParam of a parameter; null if it is not under fully_shard.
FsdpParam* find_fsdp_param(const at::Tensor& parameter);

}  // namespace megashard
