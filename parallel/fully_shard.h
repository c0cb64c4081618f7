#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "parallel/device_mesh.h"
#include "parallel/hooked_module.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// dtypes of a group (torch.distributed.fsdp.MixedPrecisionPolicy); unset fields keep the
/// parameter's dtype.
struct MixedPrecisionPolicy {
  std::optional<at::ScalarType> param_dtype{};  ///< of the gathered parameters and of compute
  std::optional<at::ScalarType>
      reduce_dtype{};  ///< of the gradient reduction; unset: the gradient's
  std::optional<at::ScalarType> output_dtype{};  ///< floating outputs are cast to it
  bool cast_forward_inputs = true;               ///< floating inputs are cast to param_dtype
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
  std::vector<at::Tensor> ignored_parameters{};  ///< neither sharded nor moved nor reduced
};

/// Shards the parameters of `module`, which must be a HookedModule (Hooked<M>, MultiModalModule),
/// on dim 0 over the mesh, in place: every parameter stays the same tensor, and holds its local
/// rows until the module runs. Bottom-up: each call takes the parameters that no earlier call on a
/// submodule took. torch.distributed.fsdp.fully_shard. Throws c10::Error with a sentence for
/// parameters that cannot be sharded.
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options);
/// Several modules as one group: gathered when the first of them runs, resharded after the last has
/// run.
void fully_shard(std::span<torch::nn::Module* const> modules, const FullyShardOptions& options);

/// The state of a module under fully_shard; null for others.
class FsdpState;
std::shared_ptr<FsdpState> fsdp_state(const torch::nn::Module& module);

/// Where the local rows of a parameter lie in the whole; for tensors that are not under
/// fully_shard, the whole.
ShardedTensor sharded_view(const at::Tensor& parameter);
/// Sizes of the whole parameter; sizes() of a sharded one are local.
std::vector<int64_t> global_sizes(const at::Tensor& parameter);

/// Copies this rank's rows of the whole weights into a sharded parameter; one that is still on meta
/// becomes real.
void assign_full_parameter(const at::Tensor& parameter, const at::Tensor& whole);
/// Gives a sharded parameter on meta memory of undefined contents (Module.to_empty).
void materialise_empty_parameter(const at::Tensor& parameter, c10::Device device);

// Run-time controls of a sharded module (methods of FSDPModule in PyTorch). All throw for other
// modules.
void set_modules_to_forward_prefetch(torch::nn::Module& module,
                                     std::span<torch::nn::Module* const> next);
void set_modules_to_backward_prefetch(torch::nn::Module& module,
                                      std::span<torch::nn::Module* const> next);
/// false: gradients stay unsharded and unreduced until a backward with true (accumulation without
/// communication).
void set_requires_gradient_sync(torch::nn::Module& module, bool sync, bool recurse = true);
/// HSDP, false: gradients are reduce-scattered but not all-reduced across replicas until a backward
/// with true.
void set_requires_all_reduce(torch::nn::Module& module, bool all_reduce, bool recurse = true);
void set_reshard_after_forward(torch::nn::Module& module, bool reshard, bool recurse = true);
void set_reshard_after_backward(torch::nn::Module& module, bool reshard, bool recurse = true);
/// false: backward callbacks leave reductions in flight and the order of prefetch alone (several
/// backwards a step).
void set_is_last_backward(torch::nn::Module& module, bool last);
/// Reports "gather", "pre_backward", "release", "post_backward" and "reduce" of each group, by
/// name, in host order.
void set_schedule_observer(
    torch::nn::Module& module,
    std::function<void(const char* event, const std::string& group)> observer);
/// Gathers now, and frees again; forward and backward do both by themselves.
void unshard(torch::nn::Module& module);
void reshard(torch::nn::Module& module);

}  // namespace megashard
