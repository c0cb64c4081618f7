#pragma once

namespace megashard {

/// `megashard pretrain [FILE.yaml] [flags]`: trains a model; argv[0] is the subcommand. Returns the
/// exit code.
int run_pretrain(int argc, char** argv);

}  // namespace megashard
