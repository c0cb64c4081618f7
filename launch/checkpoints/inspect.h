#pragma once

namespace megashard {

/// megashard inspect PATH, or --diff A B: shows, checks or compares checkpoints of any format.
/// Exit code 1 when something is damaged or differs. argv[0] is the subcommand.
int run_inspect(int argc, char** argv);

}  // namespace megashard
