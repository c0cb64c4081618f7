#pragma once

#include <cstdint>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

struct MicrobatchOptions {
  int64_t global_batch_size = 1;
  int64_t micro_batch_size = 1;
  int64_t data_parallel_size = 1;
  std::vector<int64_t> rampup{};    ///< {start, increment, samples}; empty: constant batch size
  bool decrease_if_needed = false;  ///< rounds the global batch down to a divisible size
};

MicrobatchOptions microbatch_options(const Arguments& arguments);

/// Number of microbatches per step (megatron.core.num_microbatches_calculator), constant or with ramp-up.
class Microbatches {
 public:
  /// Starts after `consumed_samples`. Throws UsageError if a later batch size is not divisible.
  explicit Microbatches(MicrobatchOptions options, int64_t consumed_samples = 0);

  /// Call before each step.
  void update(int64_t consumed_samples);

  int64_t count() const { return count_; }
  /// Samples of this step on all ranks.
  int64_t global_batch_size() const { return current_; }

 private:
  MicrobatchOptions options_;
  int64_t count_ = 1;
  int64_t current_ = 1;
};

/// The last iteration of `samples` (Megatron's update_train_iters), in whole global batches, if `iteration` steps have
/// consumed `consumed_samples` of them.
int64_t iterations_for_samples(const MicrobatchOptions& options, int64_t samples, int64_t iteration = 0,
                               int64_t consumed_samples = 0);
/// Samples of the first `iterations` steps, for checkpoints that lack the number.
int64_t samples_of_iterations(const MicrobatchOptions& options, int64_t iterations);

}  // namespace megashard
