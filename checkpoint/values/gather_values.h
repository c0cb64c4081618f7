#pragma once

#include <functional>
#include <vector>

#include "checkpoint/values/value.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// gather_or_throw (agreement.h) of plain values, which travel as pickles: what ranks tell each
/// other about files.
std::vector<Value> gather_values(const ProcessGroupPtr& group, const std::function<Value()>& work);
/// What `work` returns on the first rank, on all; the others do not run it.
Value first_rank_value(const ProcessGroupPtr& group, const std::function<Value()>& work);

}  // namespace megashard
