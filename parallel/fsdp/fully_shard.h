#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <span>
#include <vector>

#include "parallel/fsdp/fsdp_controls.h"
#include "parallel/fsdp/fully_shard_options.h"
#include "parallel/fsdp/hooked_module.h"
#include "parallel/fsdp/sharded_tensor.h"

namespace megashard {

/// Shards the parameters of `module`, which must be a HookedModule (Hooked<M>, MultiModalModule),
/// over the mesh, in place: every parameter stays the same tensor, and holds its local rows until
/// the module runs. Bottom-up: each call takes the parameters that no earlier call on a submodule
/// took. torch.distributed.fsdp.fully_shard. Throws c10::Error with a sentence for parameters that
/// cannot be sharded.
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options);
/// Several modules as one group: gathered when the first of them runs, resharded after the last has
/// run. Modules inside others of the list belong to these.
void fully_shard(std::span<torch::nn::Module* const> modules, const FullyShardOptions& options);

/// The state of a module under fully_shard; null for others.
class FsdpState;
std::shared_ptr<FsdpState> fsdp_state(const torch::nn::Module& module);

/// Where the local rows of a parameter lie in the whole model's weight (a tensor-parallel one on
/// the mesh [FSDP's dimensions, tp]); for tensors that are not under fully_shard, the whole.
ShardedTensor sharded_view(const at::Tensor& parameter);
/// Sizes of the whole parameter, over tensor-parallel ranks too; sizes() of a sharded one are
/// local.
std::vector<int64_t> global_sizes(const at::Tensor& parameter);

/// Copies this rank's rows of the whole weights into a sharded or tensor-parallel parameter; a
/// sharded one that is still on meta becomes real. Takes the whole model's weight, or this rank's
/// tensor-parallel piece of it.
void assign_full_parameter(const at::Tensor& parameter, const at::Tensor& whole);
/// Gives a sharded parameter on meta memory of undefined contents (Module.to_empty).
void materialise_empty_parameter(const at::Tensor& parameter, c10::Device device);

}  // namespace megashard
