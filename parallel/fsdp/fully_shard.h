#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/fsdp_controls.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// dtypes of a group (torch.distributed.fsdp.MixedPrecisionPolicy); unset fields keep the
/// parameter's dtype.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype{};   ///< of the gathered parameters and of compute
  std::optional<at::ScalarType> reduce_dtype{};  ///< of the gradient reduction; unset: the gradient's
  std::optional<at::ScalarType> output_dtype{};  ///< floating outputs are cast to it
  bool cast_forward_inputs = true;               ///< floating inputs are cast to param_dtype
  /// Of the gradients, before the reduction and after: what a module's backward produces in this
  /// dtype is not cast to param_dtype. Unset: param_dtype before, the stored dtype after. Ours: PyTorch has none in
  /// 2.11; later ones take each parameter's Tensor.grad_dtype.
  std::optional<at::ScalarType> grad_dtype{};
  /// Floating buffers are cast to it by fully_shard, running statistics (running_mean, running_var) too, which lose
  /// small updates in 16 bits. Unset: buffers are never cast, as by FSDP2. Of FSDP1's MixedPrecision.
  std::optional<at::ScalarType> buffer_dtype{};

  bool operator==(const MixedPrecisionPolicy&) const = default;
};

/// Local rows, their gradients and the optimizer's state lie in host memory; a gather copies rows
/// to the device, a reduction copies gradients back (torch.distributed.fsdp.CPUOffloadPolicy). The
/// mesh's group must take CPU tensors too (backend "cpu:gloo,cuda:nccl"). No effect on a CPU mesh.
struct CpuOffloadPolicy {
  bool pin_memory = true;  ///< copies need not wait for the host, but the memory cannot be paged
};

/// Ours: what becomes of a parameter that got a gradient on some ranks of its group only.
enum class UnusedParameters {
  kZeroFill,  ///< counts as zero where it is missing
  kError,     ///< backward throws on every rank, naming parameter and ranks
};

/// What happens to the gathered parameters between forward and backward.
struct ReshardAfterForward {
  enum class Kind {
    kDefault,  ///< freed, except in the root group
    kAlways,
    kNever,
    kTo,  ///< resharded to `ranks` consecutive ranks
  };
  Kind kind = Kind::kDefault;
  int ranks = 0;

  ReshardAfterForward() = default;
  /// Of a bool alone: a number of ranks is to().
  ReshardAfterForward(std::same_as<bool> auto always)  // NOLINT: reads as in PyTorch
      : kind(always ? Kind::kAlways : Kind::kNever) {}
  static ReshardAfterForward to(int ranks) {
    ReshardAfterForward value;
    value.kind = Kind::kTo;
    value.ranks = ranks;
    return value;
  }
};

/// How one parameter is sharded: a Shard in PyTorch 2.11, a ShardPlacementResult in later ones.
struct ShardPlacement {
  /// The dimension that is cut; negative ones count from the end. Dimensions other than 0 must be a multiple of the
  /// sharding ranks.
  int64_t dim = 0;
  /// How many leading dimensions are cut as one (BlockShard of a PyTorch later than 2.11): experts [experts, out, in]
  /// of fewer experts than ranks with 2, each rank getting rows of one expert; a gather is as cheap as along dimension
  /// 0. Every rank's part must be a box of the whole. More than 1 only with dim 0.
  int64_t leading_dims = 1;
  /// Other ranks than the module's: experts over what expert parallelism leaves. Of the same device; 1-D or 2-D. Null:
  /// the module's mesh. Parameters of one mesh are unsharded and reduced together.
  DeviceMeshPtr mesh{};
};

struct FullyShardOptions {
  /// 1-D: sharded over it; 2-D: replicated over dim 0, sharded over dim 1 (HSDP).
  DeviceMeshPtr mesh{};
  ReshardAfterForward reshard_after_forward{};
  MixedPrecisionPolicy mixed_precision{};
  std::optional<CpuOffloadPolicy> cpu_offload{};
  /// Asked for each parameter, more than once; unset: dimension 0 over `mesh`.
  std::function<ShardPlacement(const at::Tensor& parameter)> shard_placement_fn{};
  UnusedParameters unused_parameters = UnusedParameters::kZeroFill;
  std::vector<at::Tensor> ignored_parameters{};  ///< neither sharded nor moved nor reduced
};

/// Shards the parameters of `module`, which must be a HookedModule (Hooked<M>, MultiModalModule), over the mesh, in
/// place: every parameter stays the same tensor, and holds its local rows until the module runs. Bottom-up: each call
/// takes the parameters that no earlier call on a submodule took. torch.distributed.fsdp.fully_shard. Throws c10::Error
/// for parameters that cannot be sharded.
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options);
/// The same over all ranks of a group. Ours.
void fully_shard(torch::nn::Module& module, const ProcessGroupPtr& group, FullyShardOptions options = {});
/// Several modules as one group: unsharded when the first of them runs, resharded after the last has run. Modules
/// inside others of the list belong to these.
void fully_shard(std::span<torch::nn::Module* const> modules, const FullyShardOptions& options);

// Ours: what PyTorch's DTensor knows of a parameter, and to_local(), distribute_tensor() and to_empty() do.

bool is_sharded(const at::Tensor& parameter);          ///< under fully_shard, whether or not it is unsharded now
bool is_fsdp_module(const torch::nn::Module& module);  ///< fully_shard was called on it

/// Where the local rows of a parameter lie in the whole model's weight (a tensor-parallel one on the mesh [FSDP's
/// dimensions, tp]); for tensors that are not under fully_shard, the whole. Outside forward and backward: a parameter
/// that is still unsharded is resharded first, so that the next gather sees what is written to the rows.
ShardedTensor sharded_view(const at::Tensor& parameter);
/// The groups of more than one rank over which a parameter is cut; changes nothing.
std::vector<ProcessGroupPtr> sharding_groups_of(const at::Tensor& parameter);
/// Sizes of the whole parameter, over tensor-parallel ranks too; sizes() of a sharded one are local.
std::vector<int64_t> global_sizes(const at::Tensor& parameter);

/// Copies this rank's rows of the whole weights into a sharded or tensor-parallel parameter; a sharded one that is
/// still on meta becomes real. Takes the whole model's weight, or this rank's tensor-parallel piece of it.
void assign_full_parameter(const at::Tensor& parameter, const at::Tensor& whole);
/// Gives a sharded parameter on meta memory of undefined contents (Module.to_empty).
void materialise_empty_parameter(const at::Tensor& parameter, c10::Device device);

/// Whether it belongs to some unsharded parameter: tensors over it must not be kept or moved by bytes.
bool is_unsharded_storage(const c10::StorageImpl* storage);

}  // namespace megashard
