#pragma once

#include <functional>
#include <vector>

#include "checkpoint/values/value.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// gather_or_throw (agreement.h) of plain values, which are sent as pickles: for small data about files.
std::vector<Value> gather_values(const ProcessGroupPtr& group, const std::function<Value()>& work);
/// Runs `work` on the first rank and returns its result on all.
Value first_rank_value(const ProcessGroupPtr& group, const std::function<Value()>& work);

}  // namespace megashard
