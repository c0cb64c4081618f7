#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// How a reduction divides gradients: inputs by `before`, then the operators, then the sums by
/// `after` (_get_gradient_divide_factors of torch.distributed.fsdp).
struct GradientScaling {
  ReduceOp scatter = ReduceOp::kAvg;
  ReduceOp all_reduce = ReduceOp::kAvg;
  double before = 1;
  double after = 1;
};

/// fp32, bf16 and fp64 are averaged by the backend; fp16, whose sums could overflow, is divided
/// about half before and half after. `factor` replaces shard_ranks * replicas; `force_sum` divides
/// afterwards only.
GradientScaling gradient_scaling(int shard_ranks, int replicas, c10::ScalarType reduce_dtype,
                                 std::optional<double> factor, bool force_sum);

}  // namespace megashard
