#pragma once

namespace megashard {

/// Runs `megashard launch -n N [--master-port P] -- SUBCOMMAND ...`: starts N ranks of this program on this host.
/// argv[0] is "launch". Returns the exit code of the group.
int run_launch(int argc, char** argv);

}  // namespace megashard
