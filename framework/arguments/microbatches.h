#pragma once

#include <cstdint>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

struct MicrobatchOptions {
  int64_t global_batch_size = 1;
  int64_t micro_batch_size = 1;
  int64_t data_parallel_size = 1;
  std::vector<int64_t> rampup{};    ///< {start, increment, samples}; empty: constant
  bool decrease_if_needed = false;  ///< round the global batch down to what can be divided
};

MicrobatchOptions microbatch_options(const Arguments& arguments);

/// How many microbatches a step has (megatron.core.num_microbatches_calculator), constant or
/// growing.
class Microbatches {
 public:
  /// From a step after so many samples on. Throws UsageError when a batch that is still to come
  /// does not divide.
  explicit Microbatches(MicrobatchOptions options, int64_t consumed_samples = 0);

  /// To be called before each step.
  void update(int64_t consumed_samples);

  int64_t count() const { return count_; }
  /// The batch of this step: all samples of all ranks.
  int64_t global_batch_size() const { return current_; }

 private:
  MicrobatchOptions options_;
  int64_t count_ = 1;
  int64_t current_ = 1;
};

/// The step at which `samples` end (Megatron's update_train_iters), whole global batches only, when
/// `iteration` steps have taken `consumed_samples` of them.
int64_t iterations_for_samples(const MicrobatchOptions& options, int64_t samples, int64_t iteration = 0,
                               int64_t consumed_samples = 0);
/// The inverse, for checkpoints that do not say: samples of the first steps.
int64_t samples_of_iterations(const MicrobatchOptions& options, int64_t iterations);

}  // namespace megashard
