#pragma once

#include <cstdint>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/saved_arguments.h"

namespace megashard {

/// State of a run that changes from step to step, besides weights, optimizer, schedule and generators. Checkpoints
/// hold it.
struct Progress {
  int64_t step = 0;  ///< completed steps
  int64_t samples = 0;
  int64_t validation_samples = 0;
  double flops = 0;
};

/// The arguments as a checkpoint's args hold them: with the counts of samples, as in Megatron.
inline ArgumentRecord recorded_arguments(const Arguments& arguments, const Progress& progress) {
  ArgumentRecord record = argument_values(arguments);
  for (auto& [name, value] : record) {
    if (name == kConsumedTrainSamples) value = progress.samples;
    if (name == kConsumedValidSamples) value = progress.validation_samples;
  }
  return record;
}

}  // namespace megashard
