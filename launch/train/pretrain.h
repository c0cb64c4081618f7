#pragma once

#include <functional>

#include "launch/arguments/command_line.h"

namespace megashard {

/// Implements --dry-run; `parse` parses the command line again.
using DryRun = int (*)(CommandLine line, const std::function<CommandLine()>& parse);

/// Runs `megashard pretrain [FILE.yaml] [flags]`: trains a model; argv[0] is the subcommand. Returns the exit code.
int run_pretrain(int argc, char** argv, DryRun dry_run);

}  // namespace megashard
