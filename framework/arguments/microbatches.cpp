#include "framework/arguments/microbatches.h"

#include <algorithm>
#include <string>
#include <utility>

#include "framework/diagnostics.h"

namespace megashard {

namespace {

using std::to_string;

void check_ramp(const MicrobatchOptions& options) {
  const auto& ramp = options.rampup;
  if (ramp.empty()) return;
  const std::string shown =
      "--rampup-batch-size " + to_string(ramp.at(0)) + " " + to_string(ramp.at(1)) + " " + to_string(ramp.at(2));
  const int64_t difference = options.global_batch_size - ramp[0];
  if (ramp[0] <= 0 || ramp[1] <= 0 || ramp[2] < 0 || difference < 0) {
    throw UsageError(shown + " must start at a positive batch of at most --global-batch-size " +
                     to_string(options.global_batch_size) + " and grow by a positive increment.");
  }
  if (difference % ramp[1] != 0) {
    throw UsageError(shown + ": the growth from " + to_string(ramp[0]) + " to --global-batch-size " +
                     to_string(options.global_batch_size) + " is not divisible by the increment; change one of them.");
  }
}

/// Batch size of the ramp after `consumed_samples`.
int64_t wanted_batch(const MicrobatchOptions& options, int64_t consumed_samples) {
  const auto& ramp = options.rampup;
  if (ramp.empty() || consumed_samples > ramp[2]) return options.global_batch_size;
  const int64_t increments = (options.global_batch_size - ramp[0]) / ramp[1];
  if (increments == 0 || ramp[2] == 0) return options.global_batch_size;
  const double samples_per_increment = static_cast<double>(ramp[2]) / static_cast<double>(increments);
  return ramp[0] + static_cast<int64_t>(static_cast<double>(consumed_samples) / samples_per_increment) * ramp[1];
}

int64_t samples_of_microbatch(const MicrobatchOptions& options) {
  return options.micro_batch_size * options.data_parallel_size;
}

/// The wanted batch size, rounded down to a divisible one, but at least one microbatch per rank.
int64_t batch_after(const MicrobatchOptions& options, int64_t consumed_samples) {
  const int64_t each = samples_of_microbatch(options);
  return std::max<int64_t>(1, wanted_batch(options, consumed_samples) / each) * each;
}

bool in_ramp(const MicrobatchOptions& options, int64_t consumed_samples) {
  return !options.rampup.empty() && consumed_samples <= options.rampup[2];
}

}  // namespace

MicrobatchOptions microbatch_options(const Arguments& arguments) {
  return {.global_batch_size = arguments.global_batch_size.value_or(1),
          .micro_batch_size = arguments.micro_batch_size.value_or(1),
          .data_parallel_size = arguments.data_parallel_size,
          .rampup = arguments.rampup_batch_size,
          .decrease_if_needed = arguments.decrease_batch_size_if_needed};
}

Microbatches::Microbatches(MicrobatchOptions options, int64_t consumed_samples) : options_(std::move(options)) {
  check_ramp(options_);
  const auto divides = [this](int64_t batch) {
    const int64_t each = samples_of_microbatch(options_);
    if (batch >= each && (batch % each == 0 || options_.decrease_if_needed)) return;
    throw UsageError("global batch size " + to_string(batch) + " is not divisible by " + to_string(each) +
                     " (micro batch size " + to_string(options_.micro_batch_size) + " * data parallel size " +
                     to_string(options_.data_parallel_size) +
                     "); change --global-batch-size, --micro-batch-size or the number of ranks.");
  };
  divides(options_.global_batch_size);
  for (int64_t seen = consumed_samples; in_ramp(options_, seen);) {
    divides(wanted_batch(options_, seen));
    seen += batch_after(options_, seen);
  }
  update(consumed_samples);
}

void Microbatches::update(int64_t consumed_samples) {
  current_ = batch_after(options_, consumed_samples);
  count_ = current_ / samples_of_microbatch(options_);
}

int64_t iterations_for_samples(const MicrobatchOptions& options, int64_t samples, int64_t iteration,
                               int64_t consumed_samples) {
  int64_t seen = consumed_samples;
  while (in_ramp(options, seen) && seen + batch_after(options, seen) <= samples) {
    seen += batch_after(options, seen);
    ++iteration;
  }
  return iteration + std::max<int64_t>(0, samples - seen) / batch_after(options, seen);
}

int64_t samples_of_iterations(const MicrobatchOptions& options, int64_t iterations) {
  int64_t seen = 0;
  for (; iterations > 0 && in_ramp(options, seen); --iterations) seen += batch_after(options, seen);
  return seen + iterations * batch_after(options, seen);
}

}  // namespace megashard
