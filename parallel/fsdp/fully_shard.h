#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/fsdp_controls.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// dtypes of a unit (torch.distributed.fsdp.MixedPrecisionPolicy); unset fields keep the parameter's dtype.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype{};  ///< dtype of all-gather and compute
  /// dtype of the gradient reduction. Unset: grad_dtype, else with torch 2.15 or later the stored dtype (gradients of
  /// fp32 weights are reduced in fp32), with earlier ones param_dtype; the widest one in the unit.
  std::optional<at::ScalarType> reduce_dtype{};
  std::optional<at::ScalarType> output_dtype{};  ///< forward casts floating outputs to it
  bool cast_forward_inputs = true;               ///< forward casts floating inputs to param_dtype
  /// dtype of gradients before and after the reduction: gradients that backward computes in this dtype or, if wider, in
  /// reduce_dtype are not cast. Unset: a parameter's own (Tensor::set_grad_dtype before fully_shard; without a dtype:
  /// reduce_dtype), else param_dtype before, the stored dtype after. Ours.
  std::optional<at::ScalarType> grad_dtype{};
  /// fully_shard casts floating buffers to it, running statistics (running_mean, running_var) too, which lose small
  /// updates in 16 bits. Unset: buffers are never cast, as in FSDP2. As in FSDP1's MixedPrecision.
  std::optional<at::ScalarType> buffer_dtype{};

  bool operator==(const MixedPrecisionPolicy&) const = default;
};

/// Keeps sharded parameters, their gradients and the optimizer state in host memory: all-gathers copy rows to the
/// device, reductions copy gradients back (torch.distributed.fsdp.CPUOffloadPolicy). The mesh's group must also take
/// CPU tensors (backend "cpu:gloo,cuda:nccl"). No effect on a CPU mesh.
struct CpuOffloadPolicy {
  bool pin_memory = true;  ///< pinned memory: copies do not block the host; never paged out
};

/// Treatment of a parameter that got a gradient on some ranks of its group only. Ours.
enum class UnusedParameters {
  kZeroFill,  ///< the missing gradients count as zero
  kError,     ///< backward throws on every rank and names parameter and ranks
};

/// Whether the unsharded parameters stay between forward and backward.
struct ReshardAfterForward {
  enum class Kind {
    kDefault,  ///< freed, except in the root
    kAlways,
    kNever,
    kTo,  ///< resharded to groups of `ranks` consecutive ranks
  };
  Kind kind = Kind::kDefault;
  int ranks = 0;

  ReshardAfterForward() = default;
  /// Takes a bool only; for a number of ranks use to().
  ReshardAfterForward(std::same_as<bool> auto always)  // NOLINT: reads as in PyTorch
      : kind(always ? Kind::kAlways : Kind::kNever) {}
  static ReshardAfterForward to(int ranks) {
    ReshardAfterForward value;
    value.kind = Kind::kTo;
    value.ranks = ranks;
    return value;
  }
};

/// Sharding of one parameter: a Shard in PyTorch 2.11, a ShardPlacementResult in later ones.
struct ShardPlacement {
  /// Sharded dimension; negative ones count from the end. The size of a dimension other than 0 must be a multiple of
  /// the number of sharding ranks.
  int64_t dim = 0;
  /// Number of leading dimensions that are sharded as one (BlockShard of PyTorch after 2.11). With 2, experts [experts,
  /// out, in] can be fewer than ranks, and each rank gets rows of one expert; an all-gather costs as much as along
  /// dimension 0. Each rank's shard must be a box of the unsharded parameter. More than 1 only with dim 0.
  int64_t leading_dims = 1;
  /// Mesh of this parameter if not the module's, e.g. for experts (the ranks left by expert parallelism). Same device;
  /// 1-D or 2-D. Null: the module's mesh. Parameters of one mesh are unsharded and reduced together.
  DeviceMeshPtr mesh{};
};

/// Smallest ShardPlacement::leading_dims with which `ranks` ranks get equal shards of a tensor of these sizes, from
/// shards of dimension 0 to shards of all dimensions but the last; 1 if there is none.
int64_t leading_dims_for(at::IntArrayRef sizes, int ranks);

/// Names the dimensions of a larger mesh over which to shard and to replicate (DataParallelMeshDims of PyTorch 2.12).
/// Several names form one dimension.
struct DataParallelMeshDims {
  std::vector<std::string> shard{};      ///< shards over them; empty: parameters are whole on every rank (DDP)
  std::vector<std::string> replicate{};  ///< replicates over them (HSDP)
};

struct FullyShardOptions {
  /// 1-D: shards over it; 2-D: replicates over dim 0, shards over dim 1 (HSDP).
  DeviceMeshPtr mesh{};
  /// Set: `mesh` may have any number of named dimensions, of which these are used. The first call is collective over
  /// the mesh if several of them form one.
  std::optional<DataParallelMeshDims> dp_mesh_dims{};
  ReshardAfterForward reshard_after_forward{};
  MixedPrecisionPolicy mixed_precision{};
  std::optional<CpuOffloadPolicy> cpu_offload{};
  /// Called for each parameter, more than once. Unset: dimension 0 over `mesh`.
  std::function<ShardPlacement(const at::Tensor& parameter)> shard_placement_fn{};
  /// Called for each parameter; its result replaces mixed_precision.param_dtype for it, e.g. fp32 for a router's weight
  /// in a bf16 unit. As in PyTorch 2.15.
  std::function<std::optional<at::ScalarType>(const at::Tensor& parameter)> param_dtype_override_fn{};
  UnusedParameters unused_parameters = UnusedParameters::kZeroFill;
  std::vector<at::Tensor> ignored_parameters{};  ///< not sharded, moved or reduced
};

/// Shards the parameters of `module`, a HookedModule (Hooked<M>, MultiModalModule), over the mesh in place: each
/// parameter stays the same tensor and holds its local rows until the module runs. Call bottom-up: each call takes the
/// parameters that no earlier call on a submodule took. torch.distributed.fsdp.fully_shard. Throws c10::Error for
/// parameters that cannot be sharded.
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options);
/// Shards over all ranks of a group. Ours.
void fully_shard(torch::nn::Module& module, const ProcessGroupPtr& group, FullyShardOptions options = {});
/// Shards several modules as one unit: unsharded before the first of them runs, resharded after the last. Modules
/// inside another one of the list belong to it.
void fully_shard(std::span<torch::nn::Module* const> modules, const FullyShardOptions& options);

// Ours; in PyTorch, DTensor, its to_local(), distribute_tensor() and Module.to_empty().

bool is_sharded(const at::Tensor& parameter);          ///< true if under fully_shard, unsharded or not
bool is_fsdp_module(const torch::nn::Module& module);  ///< true if fully_shard was called on it

/// Reshards the parameter if it is still unsharded, so that the next all-gather sees what is written to its rows.
/// Returns its local rows and their place in the whole model's weight (for a tensor-parallel one, on the mesh [FSDP's
/// dimensions, tp]); a tensor that is not under fully_shard counts as whole. Call it outside forward and backward.
ShardedTensor reshard_and_view(const at::Tensor& parameter);
/// Groups of more than one rank over which a parameter is sharded. Does not reshard.
std::vector<ProcessGroupPtr> sharding_groups_of(const at::Tensor& parameter);
/// Sizes of the whole parameter, tensor-parallel ranks included; sizes() of a sharded parameter are local.
std::vector<int64_t> global_sizes(const at::Tensor& parameter);

/// Copies this rank's rows of `whole` into a sharded or tensor-parallel parameter; allocates a sharded one that is
/// still on meta. `whole`: the whole model's weight or this rank's tensor-parallel piece of it.
void assign_full_parameter(const at::Tensor& parameter, const at::Tensor& whole);
/// Allocates a sharded parameter that is on meta; contents undefined (Module.to_empty).
void materialise_empty_parameter(const at::Tensor& parameter, c10::Device device);

/// True if it is the storage of an unsharded parameter: tensors over it must not be kept or moved by bytes.
bool is_unsharded_storage(const c10::StorageImpl* storage);

}  // namespace megashard
