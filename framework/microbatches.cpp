#include "framework/microbatches.h"

#include <string>
#include <utility>

#include "framework/diagnostics.h"

namespace megashard {

namespace {

using std::to_string;

void check_ramp(const MicrobatchOptions& options) {
  const auto& ramp = options.rampup;
  if (ramp.empty()) return;
  const std::string shown = "--rampup-batch-size " + to_string(ramp.at(0)) + " " +
                            to_string(ramp.at(1)) + " " + to_string(ramp.at(2));
  const int64_t difference = options.global_batch_size - ramp[0];
  if (ramp[0] <= 0 || ramp[1] <= 0 || ramp[2] < 0 || difference < 0) {
    throw UsageError(shown + " must start at a positive batch of at most --global-batch-size " +
                     to_string(options.global_batch_size) + " and grow by a positive increment.");
  }
  if (difference % ramp[1] != 0) {
    throw UsageError(shown + ": the growth from " + to_string(ramp[0]) +
                     " to --global-batch-size " + to_string(options.global_batch_size) +
                     " is not divisible by the increment; change one of them.");
  }
}

/// The ramp's batch after so many samples.
int64_t wanted_batch(const MicrobatchOptions& options, int64_t consumed_samples) {
  const auto& ramp = options.rampup;
  if (ramp.empty() || consumed_samples > ramp[2]) return options.global_batch_size;
  const int64_t increments = (options.global_batch_size - ramp[0]) / ramp[1];
  if (increments == 0 || ramp[2] == 0) return options.global_batch_size;
  const double samples_per_increment =
      static_cast<double>(ramp[2]) / static_cast<double>(increments);
  return ramp[0] +
         static_cast<int64_t>(static_cast<double>(consumed_samples) / samples_per_increment) *
             ramp[1];
}

}  // namespace

MicrobatchOptions microbatch_options(const Arguments& arguments) {
  return {.global_batch_size = arguments.global_batch_size.value_or(1),
          .micro_batch_size = arguments.micro_batch_size.value_or(1),
          .data_parallel_size = arguments.data_parallel_size,
          .rampup = arguments.rampup_batch_size,
          .decrease_if_needed = arguments.decrease_batch_size_if_needed};
}

Microbatches::Microbatches(MicrobatchOptions options) : options_(std::move(options)) {
  check_ramp(options_);
  update(0);
}

void Microbatches::update(int64_t consumed_samples) {
  const int64_t wanted = wanted_batch(options_, consumed_samples);
  const int64_t each = options_.micro_batch_size * options_.data_parallel_size;
  const bool divides = wanted % each == 0;
  if ((!divides && !options_.decrease_if_needed) || wanted < each) {
    throw UsageError("global batch size " + to_string(wanted) + " is not divisible by " +
                     to_string(each) + " (micro batch size " +
                     to_string(options_.micro_batch_size) + " * data parallel size " +
                     to_string(options_.data_parallel_size) +
                     "); change --global-batch-size, --micro-batch-size or the number of ranks.");
  }
  count_ = wanted / each;
  current_ = count_ * each;
}

int64_t iterations_for_samples(const MicrobatchOptions& options, int64_t samples) {
  Microbatches batches(options);
  int64_t iterations = 0, consumed = 0;
  const int64_t ramp_samples = options.rampup.empty() ? 0 : options.rampup[2];
  while (!options.rampup.empty() && consumed <= ramp_samples &&
         consumed + batches.global_batch_size() <= samples) {
    consumed += batches.global_batch_size();
    ++iterations;
    batches.update(consumed);
  }
  return iterations + (samples - consumed) / batches.global_batch_size();
}

}  // namespace megashard
