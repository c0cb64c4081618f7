#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Of `parameters`, those that every rank holds whole and nothing reduces: neither fully_shard nor
/// tensor parallelism has them (ignored_modules of the FSDP2 file).
std::vector<at::Tensor> replicated_parameters(const std::vector<at::Tensor>& parameters);

/// Averages their gradients over the ranks, as fully_shard does for its own, by one all-reduce in
/// fp32 (fp64 if one of them is). A gradient that some ranks lack counts as zero there; one that
/// all lack stays undefined. Collective: every rank passes the same parameters, once a step, after
/// the last backward.
void reduce_replicated_gradients(const std::vector<at::Tensor>& parameters, ProcessGroup& group);

}  // namespace megashard
