#pragma once

#include <optional>
#include <string>

#include "checkpoint/dcp/dcp_metadata.h"
#include "checkpoint/values/value.h"

namespace megashard {

/// What is in a torch_dist folder (of megatron-core or of us), told as torch_dcp tells it, so that
/// DcpReader reads both:
/// - stacked layers are tensors of their own: "decoder.layers.mlp.w" [L, 8, 4] is
///   "model.decoder.layers.0.mlp.w" [8, 4], ..., and optimizer buffers stand behind the weight;
/// - common.pt (or the ShardedObject "common_state" of newer ones) is plain values
///   (DcpKnownValue); the optimizer's common_step is "optimizer.state.<weight>.step" of each
///   weight, and param_groups lie at "optimizer.param_groups" also for Megatron's mixed precision
///   optimizer, which nests them once more;
/// - the ShardedObject rng_state, which Megatron keeps as a list over data parallel ranks and we as
///   one object a rank, is "rng_state.<rank>", in a list or a dict; other ShardedObjects keep their
///   key.
/// Reads .metadata, common.pt and common_state, no tensors. Throws for damaged ones.
DcpMetadata read_torch_dist_metadata(const std::string& folder);
/// The same of .metadata and common.pt (nothing: there is none) that have been read; only what
/// `stored` names is read from the folder.
DcpMetadata view_torch_dist(DcpMetadata stored, std::optional<DcpKnownValue> common, const std::string& folder);

}  // namespace megashard
