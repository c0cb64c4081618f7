#pragma once

#include <optional>
#include <string>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// Reads the metadata of a torch_dist folder (of megatron-core or ours) in torch_dcp's form, so that DcpReader reads
/// both:
/// - stacked layers are separate tensors: "decoder.layers.mlp.w" [L, 8, 4] is "model.decoder.layers.0.mlp.w" [8, 4],
///   ..., and optimizer buffers follow the weight;
/// - common.pt (or the ShardedObject "common_state" of newer versions) becomes plain values (DcpKnownValue); the
///   optimizer's common_step is "optimizer.state.<weight>.step" of each weight, and param_groups are at
///   "optimizer.param_groups", also for Megatron's mixed precision optimizer, which nests them one level deeper;
/// - the ShardedObject rng_state, in Megatron a list over data parallel ranks and here one object per rank, is
///   "rng_state.<rank>", in a list or a dict; other ShardedObjects keep their key.
/// Reads .metadata, common.pt and common_state, but no tensors. Throws if they are damaged.
DcpMetadata read_torch_dist_metadata(const std::string& folder);
/// As read_torch_dist_metadata, from .metadata and common.pt that are already read (nullopt: no common.pt). Reads from
/// the folder only what `stored` refers to.
DcpMetadata view_torch_dist(DcpMetadata stored, std::optional<DcpKnownValue> common, const std::string& folder);

}  // namespace megashard
