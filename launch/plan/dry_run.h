#pragma once

#include "launch/arguments/command_line.h"

namespace megashard {

/// Runs `megashard pretrain --dry-run`: prints the arguments with their origins, the units, the data, the source of the
/// weights, and a plan. Does not train or write anything.
int run_dry_run(const CommandLine& line);

}  // namespace megashard
