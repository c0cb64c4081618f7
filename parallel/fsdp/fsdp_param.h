#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/collectives/guard_key.h"
#include "parallel/fsdp/all_gather_extension.h"
#include "parallel/fsdp/comm_streams.h"
#include "parallel/fsdp/full_storage.h"
#include "parallel/fsdp/fully_shard_options.h"
#include "parallel/fsdp/shard_geometry.h"
#include "parallel/tensor_parallel/tensor_parallel.h"

namespace torch::autograd {
struct Node;
}

namespace megashard {

class FsdpGroup;

/// Which ranks hold a parameter: sharded over one group, replicated over another (HSDP) or over
/// none.
struct ShardLayout {
  DeviceMeshPtr mesh;
  ProcessGroupPtr shard_group;
  ProcessGroupPtr replicate_group;  // null: no replicas
};

/// One parameter under fully_shard (FSDPParam in PyTorch). Its TensorImpl is the module's for ever;
/// it is switched between the local rows (what optimizers see, in the stored dtype, guarded) and
/// the gathered tensor (in the compute dtype) by TensorImpl::shallow_copy_from. See
/// docs/parameter_identity.md.
class FsdpParam {
 public:
  FsdpParam(at::Tensor parameter, std::string name, const ShardLayout& layout, FsdpGroup* group,
            const FullyShardOptions& options);
  ~FsdpParam();
  FsdpParam(const FsdpParam&) = delete;
  FsdpParam& operator=(const FsdpParam&) = delete;

  const std::string& name() const { return info_->name; }
  void set_name(const std::string& name);
  const at::Tensor& parameter() const { return parameter_; }
  FsdpGroup* group() const { return group_; }
  const at::Tensor& shard() const { return shard_; }  ///< local rows, unguarded; may have none
  /// The same, on the mesh's device: under CPU offload, a copy on its way on the current stream.
  at::Tensor shard_on_device() const;
  /// Of the gathered tensor, which under tensor parallelism is this rank's piece of view()'s whole.
  const ShardGeometry& geometry() const { return geometry_; }
  at::ScalarType stored_dtype() const { return shard_.scalar_type(); }
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  bool trainable() const { return parameter_.requires_grad(); }
  bool is_meta() const { return shard_.is_meta(); }
  ShardedTensor view() const;  ///< the local rows in the whole model's weight

  /// Fixes the compute dtype and makes the gathered form. Called before the first gather, and when
  /// adopt_rebound_data asks for it.
  void prepare(std::optional<at::ScalarType> param_dtype);
  void set_extension(std::shared_ptr<AllGatherExtension> extension) {
    extension_ = std::move(extension);
  }
  AllGatherExtension* extension() const { return extension_.get(); }
  FullStorage& full() { return full_; }
  /// The gathered form is the shard itself: one rank holds all rows, in the compute dtype.
  bool shares_shard() const { return shares_shard_; }

  /// Compares the parameter with the shard, which Module::to, set_data or a load of the user may
  /// have replaced; takes over new local rows or a new whole, and throws for anything else. Returns
  /// whether the dtype is another one than prepare saw: prepare again. Sharded state only.
  bool adopt_rebound_data();
  void to_full();     ///< the full storage has been filled
  void to_sharded();  ///< does not free the full storage
  bool is_full() const { return is_full_; }
  bool changed_while_full() const;  ///< by an operator that wrote into the parameter itself

  /// Copies this rank's rows out of the whole parameter (or its tensor-parallel piece), making a
  /// meta shard real first.
  void assign_full(const at::Tensor& whole);
  void materialise_empty(c10::Device device);  ///< meta only; contents undefined

  // Gradients. During backward parameter().grad() is the whole gradient; the sharded one waits
  // here.
  void stash_gradient();
  at::Tensor take_full_gradient();  ///< what backward accumulated, undefined if nothing; restores
                                    ///< the sharded one
  /// Adds the local rows that lie at `offset` of a reduced 1-D buffer, converted to the gradient's
  /// dtype; the gradient may be a view of the buffer.
  void add_sharded_gradient(const at::Tensor& buffer, int64_t offset);
  void wait_for_offloaded_gradient();  ///< the host waits; no-op without CPU offload
  void add_gradient_hook(std::function<void(const at::Tensor&)> hook) {
    gradient_hooks_.push_back(std::move(hook));
  }
  bool has_gradient_hooks() const { return !gradient_hooks_.empty(); }
  void run_gradient_hooks();
  at::Tensor& accumulated_gradient() {
    return accumulated_;
  }  ///< whole, unreduced; from backwards without sync

 private:
  void bind_shard(const at::Tensor& local);
  void check_grad_dtype() const;
  at::Tensor part_of(const at::Tensor& whole) const;
  at::Tensor rows_of(const at::Tensor& whole) const;
  c10::Device shard_device() const;
  at::ScalarType gradient_dtype() const { return policy_.grad_dtype.value_or(stored_dtype()); }
  at::Tensor to_stored_gradient(const at::Tensor& rows, bool adds);
  void switch_to(const at::Tensor& tensor);
  void install_accumulator();
  void remove_accumulator();

  at::Tensor parameter_;
  FsdpGroup* group_;
  ShardLayout layout_;
  std::optional<TensorParallelLayout> tensor_parallel_;
  DeviceMeshPtr joint_mesh_;  // with the tensor-parallel dimension
  c10::intrusive_ptr<GuardInfo> info_;
  c10::intrusive_ptr<GuardInfo> gradient_info_;
  MixedPrecisionPolicy policy_;
  std::optional<CpuOffloadPolicy> offload_;
  ShardGeometry geometry_;
  int rank_ = 0;
  std::shared_ptr<AllGatherExtension> extension_;
  at::Tensor shard_;          // [local rows, ...]
  at::Tensor guarded_shard_;  // the same storage; what the parameter is while sharded
  at::ScalarType compute_dtype_ = at::kFloat;
  FullStorage full_;
  at::ScalarType prepared_dtype_ = at::kFloat;  // stored, when prepare was called
  bool shares_shard_ = false;
  bool is_full_ = false;
  int64_t version_when_gathered_ = 0;
  bool stashed_ = false;
  at::Tensor stashed_gradient_;
  at::Tensor accumulated_;
  StreamEvent offloaded_gradient_;  // its copy to the host is done
  std::vector<std::function<void(const at::Tensor&)>> gradient_hooks_;
  std::shared_ptr<torch::autograd::Node> accumulator_;  // the one AccumulateGrad, of the full shape
  uintptr_t accumulator_hook_ = 0;  // tells the group that the gradient is complete
};

/// The FsdpParam behind a parameter; null if it is not under fully_shard.
FsdpParam* find_fsdp_param(const at::Tensor& parameter);

}  // namespace megashard
