#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "parallel/collectives/device_mesh.h"

namespace megashard {

/// dtypes of a group (torch.distributed.fsdp.MixedPrecisionPolicy); unset fields keep the
/// parameter's dtype.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype{};  ///< of the gathered parameters and of compute
  std::optional<at::ScalarType>
      reduce_dtype{};  ///< of the gradient reduction; unset: the gradient's
  std::optional<at::ScalarType> output_dtype{};  ///< floating outputs are cast to it
  bool cast_forward_inputs = true;               ///< floating inputs are cast to param_dtype
  /// Of the gradients, before the reduction and after: what a module's backward produces in this
  /// dtype is not cast to param_dtype. Unset: param_dtype before, the stored dtype after.
  std::optional<at::ScalarType> grad_dtype{};
  /// Floating buffers are cast to it by fully_shard, except running statistics (running_mean,
  /// running_var), which lose too much in 16 bits. Unset: buffers are never cast, as in PyTorch.
  std::optional<at::ScalarType> buffer_dtype{};
};

/// Local rows, their gradients and the optimizer's state lie in host memory; a gather copies rows
/// to the device, a reduction copies gradients back (torch.distributed.fsdp.CPUOffloadPolicy). The
/// mesh's group must take CPU tensors too (backend "cpu:gloo,cuda:nccl"). No effect on a CPU mesh.
struct CpuOffloadPolicy {
  bool pin_memory = true;  ///< copies need not wait for the host, but the memory cannot be paged
};

/// What becomes of a parameter that got a gradient on some ranks of its group only.
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
  ReshardAfterForward(bool always)
      : kind(always ? Kind::kAlways : Kind::kNever) {}  // NOLINT: reads as in PyTorch
  static ReshardAfterForward to(int ranks) {
    ReshardAfterForward value;
    value.kind = Kind::kTo;
    value.ranks = ranks;
    return value;
  }
};

struct FullyShardOptions {
  DeviceMeshPtr
      mesh;  ///< 1-D: sharded over it; 2-D: replicated over dim 0, sharded over dim 1 (HSDP)
  ReshardAfterForward reshard_after_forward{};
  MixedPrecisionPolicy mixed_precision{};
  std::optional<CpuOffloadPolicy> cpu_offload{};
  /// The dimension along which a parameter is sharded (shard_placement_fn); negative ones count
  /// from the end. Unset: 0. Dimensions other than 0 must be a multiple of the sharding ranks.
  std::function<int64_t(const at::Tensor& parameter)> shard_dim{};
  /// How many leading dimensions of a parameter are cut as one (BlockShard): experts [experts, out,
  /// in] of fewer experts than ranks with 2, each rank getting rows of one expert; a gather is as
  /// cheap as along dimension 0. Every rank's part must be a box of the whole. Unset: 1.
  std::function<int64_t(const at::Tensor& parameter)> shard_leading_dims{};
  /// The mesh of a parameter that is sharded over other ranks than the module's
  /// (ShardPlacementResult): experts over what expert parallelism leaves. Of the same device; 1-D
  /// or 2-D. Null: `mesh`. Parameters of one mesh are gathered and reduced together.
  std::function<DeviceMeshPtr(const at::Tensor& parameter)> parameter_mesh{};
  UnusedParameters unused_parameters = UnusedParameters::kZeroFill;
  std::vector<at::Tensor> ignored_parameters{};  ///< neither sharded nor moved nor reduced
};

}  // namespace megashard
