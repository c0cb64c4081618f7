#pragma once

#include <nlohmann/json_fwd.hpp>

#include "checkpoint/inspect/checkpoint_summary.h"

namespace megashard {

/// Prints the summary of `megashard inspect`: one line for each part of the checkpoint.
void print_checkpoint_summary(const CheckpointReader& reader, const CheckpointSummary& summary);
nlohmann::ordered_json checkpoint_summary_json(const CheckpointSummary& summary);

}  // namespace megashard
