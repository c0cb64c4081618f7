#pragma once

#include "launch/arguments/command_line.h"

namespace megashard {

/// Implements --dry-run.
using DryRun = int (*)(const CommandLine& line);

/// Runs `megashard pretrain [FILE.yaml] [flags]`: trains a model; argv[0] is the subcommand. Returns the exit code.
int run_pretrain(int argc, char** argv, DryRun dry_run);

/// Runs `megashard rl RUN ...`: run_pretrain on the rollouts in RUN/rollouts, with the weights in RUN/broadcasts.
int run_rl(int argc, char** argv, DryRun dry_run);

/// Runs `megashard serve SOCKET ...`: trains on losses that another process computes.
int run_serve(int argc, char** argv);

}  // namespace megashard
