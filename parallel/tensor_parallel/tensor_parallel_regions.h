#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

// Transitions between the replicated and the parallel region of a tensor-parallel layer (megatron.core
// tensor_parallel.mappings). Each function's backward is its counterpart's forward. Collective over `group`; no-op for
// one rank. Sums are the group's: on CPUs in rank order, bit-identical on all ranks.

/// Forward: identity. Backward: all-reduce (sum).
at::Tensor copy_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: all-reduce (sum). Backward: identity.
at::Tensor reduce_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: this rank's piece [..., n / ranks] of [..., n]. Backward: all-gather.
at::Tensor scatter_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: all-gather of pieces [..., n] to [..., ranks * n]. Backward: this rank's piece.
at::Tensor gather_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);

// Transitions between layers with rows [B, T / ranks, C] per rank (Megatron's sequence parallelism) and layers that see
// the whole sequence. T is a multiple of the ranks.

/// Forward: all-gather of rows. Backward: reduce-scatter (sum) of the ranks' partial gradients.
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group);
/// Forward: reduce-scatter (sum) to this rank's rows. Backward: all-gather.
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: all-gather of rows. Backward: this rank's rows of the gradient, which is the same on all ranks.
at::Tensor gather_replicated_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group);
/// Forward: this rank's rows. Backward: all-gather.
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);

}  // namespace megashard
