#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

// Between the replicated and the parallel region of a tensor-parallel layer (megatron.core
// tensor_parallel.mappings). Each function's backward is its counterpart's forward. Collective over
// `group`; a group of one rank changes nothing. Sums are those of the group: on CPUs in rank order,
// bit-equal on all ranks.

/// Forward: the input. Backward: the sum of the ranks' gradients.
at::Tensor copy_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: the sum of the ranks' inputs. Backward: the gradient.
at::Tensor reduce_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: this rank's piece [..., n / ranks] of the input [..., n]. Backward: the pieces'
/// gradients together.
at::Tensor scatter_to_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: the ranks' pieces [..., n] together, [..., ranks * n]. Backward: this rank's piece of
/// the gradient.
at::Tensor gather_from_tensor_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);

// Between layers whose ranks have rows [B, T / ranks, C] of a sequence each (Megatron's sequence
// parallelism) and those in which every rank sees the whole of it. T is a multiple of the ranks.

/// Forward: the ranks' rows together. Backward: this rank's rows of the sum of the gradients, which
/// are parts of it.
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group);
/// Forward: this rank's rows of the sum of the ranks' inputs. Backward: the gradients of all rows.
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);
/// Forward: the ranks' rows together. Backward: this rank's rows of the gradient, which all ranks
/// have whole.
at::Tensor gather_replicated_from_sequence_parallel_region(const at::Tensor& rows, const ProcessGroupPtr& group);
/// Forward: this rank's rows. Backward: the gradients of all rows.
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& input, const ProcessGroupPtr& group);

}  // namespace megashard
