#pragma once

namespace megashard {

/// `megashard config --check FILE...`: what becomes of each key of configuration files; argv[0] is the subcommand.
/// Returns the exit code: not 0 if a key is refused.
int run_config(int argc, char** argv);

}  // namespace megashard
