#pragma once

#include <functional>

#include "launch/arguments/command_line.h"

namespace megashard {

/// `megashard pretrain --dry-run`: prints the arguments and where they come from, the units, the data, where the
/// weights come from, and a plan. Trains nothing and writes nothing; `parse` reads the line anew.
int run_dry_run(CommandLine line, const std::function<CommandLine()>& parse);

}  // namespace megashard
