#pragma once

namespace megashard {

/// Runs megashard inspect PATH, or --diff A B: shows, verifies or compares checkpoints of any format. Exit code 1 for
/// damage or differences. argv[0] is the subcommand.
int run_inspect(int argc, char** argv);

}  // namespace megashard
