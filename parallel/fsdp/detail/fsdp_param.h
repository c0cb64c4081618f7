#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/device/streams.h"
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

/// Which ranks hold a parameter: sharded over one group, replicated over another (HSDP) or over none.
struct ShardLayout {
  DeviceMeshPtr mesh;
  ProcessGroupPtr shard_group;
  ProcessGroupPtr replicate_group;  // null: no replicas
};

/// One parameter under fully_shard (FSDPParam). Its TensorImpl is the module's for ever; it is switched between the
/// sharded parameter (local rows: what optimizers see, in the stored dtype, guarded) and the unsharded one (in the
/// compute dtype) by TensorImpl::shallow_copy_from. See docs/parameter_identity.md.
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
  const at::Tensor& sharded_param() const { return sharded_param_; }  ///< local rows, unguarded; may have none
  /// The same, on the mesh's device: under CPU offload, a copy on its way on the current stream.
  at::Tensor sharded_param_on_device() const;
  /// Of the unsharded parameter, which under tensor parallelism is this rank's piece of the whole model's.
  const ShardGeometry& geometry() const { return geometry_; }
  at::ScalarType stored_dtype() const { return sharded_param_.scalar_type(); }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  bool trainable() const { return parameter_.requires_grad(); }
  bool is_meta() const { return sharded_param_.is_meta(); }
  ShardedTensor sharded_tensor() const;  ///< the local rows in the whole model's weight
  /// sharding_groups() of it.
  const std::vector<ProcessGroupPtr>& sharding_groups() const { return sharding_groups_; }

  /// Fixes the compute dtype and makes the unsharded storage; keeps the one that is there if it still fits, because
  /// graphs that are alive hold views of it. Called before the first gather, and when reset_sharded_param asks for it.
  void init_unsharded(std::optional<at::ScalarType> param_dtype);
  void set_extension(std::shared_ptr<AllGatherExtension> extension) { extension_ = std::move(extension); }
  AllGatherExtension* extension() const { return extension_.get(); }
  UnshardedStorage& unsharded() { return unsharded_; }
  const UnshardedStorage& unsharded() const { return unsharded_; }
  /// The unsharded parameter is the sharded one: one rank holds all rows, in the compute dtype.
  bool aliases_sharded_param() const { return aliases_sharded_param_; }

  /// Compares the parameter with the sharded one, which Module::to, set_data or a load of the user may have replaced;
  /// takes over new local rows or a new whole, and throws for anything else. Returns whether the dtype is another one
  /// than init_unsharded saw. Sharded state only.
  bool reset_sharded_param();
  void to_unsharded();    ///< the unsharded storage has been filled
  void to_sharded();      ///< does not free it
  void free_unsharded();  ///< to_sharded, and frees it
  bool is_unsharded() const { return is_unsharded_; }
  bool changed_while_unsharded() const;  ///< by an operator that wrote into the parameter itself

  /// Copies this rank's rows out of the full parameter (or its tensor-parallel piece), making a meta one real first.
  void assign_full(const at::Tensor& full);
  void materialise_empty(c10::Device device);  ///< meta only; contents undefined

  // Gradients. During backward parameter().grad() is the unsharded gradient; the sharded one is set aside here.
  void set_aside_sharded_grad();
  /// What backward accumulated, undefined if nothing; restores the sharded gradient.
  at::Tensor take_unsharded_grad();
  /// Unreduced, in the reduce dtype; from backwards without sync.
  at::Tensor& unsharded_accumulated_grad() { return unsharded_accumulated_grad_; }
  /// Adds the local rows that lie at `offset` of a reduced 1-D buffer, converted to the gradient's dtype, or widened as
  /// they are added on a device; the gradient may be a view of the buffer.
  void accumulate_sharded_grad(const at::Tensor& buffer, int64_t offset);
  /// Rows in such a buffer will be the gradient themselves. The same on all ranks.
  bool takes_reduced_rows(const at::Tensor& buffer) const;
  /// There is a gradient on a device, to which rows are added.
  bool adds_on_device() const;
  void wait_for_offloaded_grad();  ///< the host waits; no-op without CPU offload
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
  std::optional<TensorParallelLayout> tensor_parallel_;
  DeviceMeshPtr joint_mesh_;  // with the tensor-parallel dimension
  std::vector<ProcessGroupPtr> sharding_groups_;
  c10::intrusive_ptr<GuardInfo> info_;
  c10::intrusive_ptr<GuardInfo> grad_info_;
  MixedPrecisionPolicy policy_;
  std::optional<CpuOffloadPolicy> offload_;
  ShardGeometry geometry_;
  int rank_ = 0;
  std::shared_ptr<AllGatherExtension> extension_;
  at::Tensor sharded_param_;          // [local rows, ...]
  at::Tensor guarded_sharded_param_;  // the same storage; what the parameter is while sharded
  at::ScalarType compute_dtype_ = at::kFloat;
  UnshardedStorage unsharded_;
  std::optional<at::ScalarType> stored_dtype_seen_;  // by init_unsharded
  bool aliases_sharded_param_ = false;
  bool is_unsharded_ = false;
  int64_t version_when_unsharded_ = 0;
  bool sharded_grad_is_aside_ = false;
  at::Tensor sharded_grad_;  // set aside
  at::Tensor unsharded_accumulated_grad_;
  StreamEvent offloaded_grad_;  // its copy to the host is done
  std::vector<std::function<void(const at::Tensor&)>> grad_hooks_;
  std::shared_ptr<torch::autograd::Node> accumulator_;  // the one AccumulateGrad, of the unsharded shape
  uintptr_t accumulator_hook_ = 0;                      // tells the group that the gradient is complete
};

using FsdpParams = std::vector<std::unique_ptr<FsdpParam>>;

/// Puts the unsharded storages of those that keep_adjacent was given together into one memory, where that is possible.
void place_adjacent(const FsdpParams& params);

/// The FsdpParam behind a parameter; null if it is not under fully_shard.
FsdpParam* find_fsdp_param(const at::Tensor& parameter);

}  // namespace megashard
