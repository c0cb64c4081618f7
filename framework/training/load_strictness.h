#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "framework/arguments/checkpoint_arguments.h"

namespace megashard {

/// What --dist-ckpt-strictness says about names that only one side has. Missing and unexpected are
/// PyTorch's words; Megatron's values call the first kind "unexpected".
struct LoadStrictness {
  enum class Handling { kRefuse, kPrint, kIgnore };
  Handling missing = Handling::kRefuse;     ///< the run has it, the checkpoint does not
  Handling unexpected = Handling::kRefuse;  ///< the checkpoint has it, the run does not
};

/// Of one of Megatron's StrictHandling values; unset: both kinds are refused. return_* print, as a
/// program has no caller to return them to.
LoadStrictness load_strictness(const std::optional<StrictHandling>& value);

/// Throws UsageError with both lists and the remedy, or returns the lines to print.
std::vector<std::string> judge_differences(const LoadReport& report, const LoadStrictness& strictness,
                                           const std::string& folder);

}  // namespace megashard
