#pragma once

namespace megashard {

/// Runs `megashard config --check FILE...`, which reports how each key of configuration files is used; argv[0] is the
/// subcommand. Returns the exit code, non-zero if a key is refused.
int run_config(int argc, char** argv);

}  // namespace megashard
