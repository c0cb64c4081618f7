#include "parallel/fsdp/gradient_scaling.h"

#include <cmath>

namespace megashard {

GradientScaling gradient_scaling(int shard_ranks, int replicas, c10::ScalarType reduce_dtype,
                                 std::optional<double> factor, bool force_sum) {
  const int ranks = shard_ranks * replicas;
  const double divisor = factor.value_or(ranks);
  if (ranks == 1) return {ReduceOp::kSum, ReduceOp::kSum, 1, divisor};
  if (reduce_dtype != c10::kHalf) {
    if (!factor && !force_sum) return {};
    return {ReduceOp::kSum, ReduceOp::kSum, 1, divisor};
  }
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {ReduceOp::kSum, ReduceOp::kSum, before, divisor / before};
}

}  // namespace megashard
