#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Conversion of keys. In torch_dist a weight has no "model." prefix, and optimizer buffers precede the weight:
/// "model.<name>" is "<name>", "optimizer.state.<name>.exp_avg" is "optimizer.state.exp_avg.<name>". With several
/// chained optimizers Megatron's keys begin with "chained_<n>.". The prefix is dropped for buffers of weights, since no
/// weight is in two; other "chained_<n>.optimizer.<rest>" become "optimizer.chained_<n>.<rest>". Other optimizer keys
/// are the same in both formats.
std::string torch_dist_key(const std::string& torch_dcp_key);
std::string torch_dcp_key(const std::string& torch_dist_key);

/// "optimizer.state.<name>.step": if all are equal, torch_dist stores them once, as common_step of the optimizer's
/// state in common.pt.
inline constexpr const char* kCommonStep = "common_step";
bool is_optimizer_step(const std::string& torch_dcp_key);

/// True for a tensor of Megatron's DistributedOptimizer: the flattened weights of a bucket, concatenated in rank order
/// ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_<..>.bucket_idx_0.exp_avg"). Not supported for reading.
bool is_optimizer_bucket(const std::string& torch_dcp_key);

/// Key of common.pt with a list of parameter names per group. Megatron puts its own parameters into
/// optimizer.param_groups, so names must not be there.
inline constexpr const char* kTorchDistGroupNames = "param_group_names";

/// Key of the ShardedObject rng_state: "rng_state/shard_<rank>_<world>" of each rank, or Megatron's list over ranks,
/// which is one object.
inline constexpr const char* kRngStateShard = "rng_state/shard_";
inline constexpr const char* kAllRanks = "0.0_1.1";
/// End of the ShardedObject key of a module's _extra_state, before "<layer>_<layers>".
inline constexpr const char* kExtraStateShard = "_extra_state/shard_";
/// Key of common.pt with Megatron's description of the other keys.
inline constexpr const char* kContentMetadata = "content_metadata";

/// Location of a tensor in a torch_dist folder: under its own key, or as one row of a stack.
struct TorchDistPlace {
  std::string key;
  std::optional<int64_t> layer;  ///< row of the leading axis; nullopt: not stacked
  int64_t layers = 0;            ///< length of that axis
};

/// Locations of all tensors of a checkpoint, given their torch_dcp keys. Layers "<prefix>layers.<i>.<rest>" are stacked
/// under "<prefix>layers.<rest>" if every layer has the same tensors with equal sizes and dtypes; otherwise all layers
/// of the list keep their numbers (non_homogeneous_layers of
/// megatron.core.transformer.TransformerBlock.sharded_state_dict).
std::vector<TorchDistPlace> torch_dist_places(const std::vector<TensorInfo>& tensors);

/// The tensors as torch_dist stores them: its keys; stacked ones have sizes [layers, ...], offsets [layer, ...] and a
/// local view [1, ...], and several share one key.
ShardedTensors stack_layers(const ShardedTensors& tensors);

/// "decoder.layers.mlp.w" and 3: "decoder.layers.3.mlp.w"; nullopt if the key is not a stack's.
std::optional<std::string> key_of_layer(const std::string& stacked_key, int64_t layer);

}  // namespace megashard
