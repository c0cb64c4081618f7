#pragma once

namespace megashard {

/// `megashard infer`: log-probabilities of a data set and greedy continuations. argv[0] is the
/// subcommand.
int run_infer(int argc, char** argv);

}  // namespace megashard
