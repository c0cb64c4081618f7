#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/tensor_info.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

/// Megatron's names. In torch_dist a weight has no "model." before it, and the optimizer's buffers
/// come before the weight: "model.<name>" is "<name>", "optimizer.state.<name>.exp_avg" is
/// "optimizer.state.exp_avg.<name>". Of several optimizers in a chain Megatron's begin with
/// "chained_<n>.": that is left out where it holds the buffers of weights, as no weight is in two;
/// "chained_<n>.optimizer.<rest>" of other kinds is "optimizer.chained_<n>.<rest>". Other keys of
/// an optimizer are the same in both formats.
std::string torch_dist_key(const std::string& torch_dcp_key);
std::string torch_dcp_key(const std::string& torch_dist_key);

/// "optimizer.state.<name>.step", which torch_dist keeps once, as common_step of the optimizer's
/// state in common.pt, when all are equal.
inline constexpr const char* kCommonStep = "common_step";
bool is_optimizer_step(const std::string& torch_dcp_key);

/// A tensor of Megatron's DistributedOptimizer over the weights of a bucket, flattened, one behind
/// the other as its ranks had them: nothing here reads it ("optimizer.distributed.dp_group_idx_0.
/// gbuf_idx_0.dtype_<..>.bucket_idx_0.exp_avg").
bool is_optimizer_bucket(const std::string& torch_dcp_key);

/// Megatron puts its own parameters into optimizer.param_groups, so that names would be in the way:
/// they are kept under this key of common.pt, a list of names for each group.
inline constexpr const char* kTorchDistGroupNames = "param_group_names";

/// The ShardedObject rng_state: "rng_state/shard_<rank>_<world>" of each rank, or the list over
/// ranks that Megatron keeps, which is one object.
inline constexpr const char* kRngStateShard = "rng_state/shard_";
inline constexpr const char* kAllRanks = "0.0_1.1";
/// Ends in the ShardedObject of a module's _extra_state, before "<layer>_<layers>".
inline constexpr const char* kExtraStateShard = "_extra_state/shard_";
/// Of common.pt: how Megatron is to read the rest.
inline constexpr const char* kContentMetadata = "content_metadata";

/// Where a tensor lies in a torch_dist folder: under a key of its own, or as one row of a stack.
struct TorchDistPlace {
  std::string key;
  std::optional<int64_t> layer;  ///< row of the leading axis; nothing: not stacked
  int64_t layers = 0;            ///< length of that axis
};

/// Places of all tensors of a checkpoint, given by their torch_dcp keys. The layers of a list
/// "<prefix>layers.<i>.<rest>" are stacked under "<prefix>layers.<rest>" when every layer has the
/// same tensors, of the same sizes and dtypes; otherwise all layers of the list keep their numbers
/// (non_homogeneous_layers of megatron.core.transformer.TransformerBlock.sharded_state_dict).
std::vector<TorchDistPlace> torch_dist_places(const std::vector<TensorInfo>& tensors);

/// The tensors as torch_dist stores them: keys, and for stacked ones sizes [layers, ...], offsets
/// [layer, ...] and a local view [1, ...]; several then share one key.
ShardedTensors stack_layers(const ShardedTensors& tensors);

/// "decoder.layers.mlp.w" and 3: "decoder.layers.3.mlp.w"; nothing when the key names no stack.
std::optional<std::string> key_of_layer(const std::string& stacked_key, int64_t layer);

}  // namespace megashard
