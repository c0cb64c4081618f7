#pragma once

#include <cstdint>

#include "framework/arguments/arguments.h"
#include "framework/data/build_datasets.h"
#include "framework/training/progress.h"

namespace megashard {

/// Asks for as many samples of each split as a training of `train_iters` steps takes from `progress` on, sized
/// as by Megatron: an earlier run may have evaluated more often than this one.
void ask_for_samples(const Arguments& arguments, int64_t train_iters, const Progress& progress, DataOptions& data);

}  // namespace megashard
