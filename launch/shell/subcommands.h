#pragma once

namespace megashard {

// Programs of `megashard SUBCOMMAND ...`: argv[0] is the subcommand; each returns the exit code and throws UsageError
// for wrong flags and for files that are missing or invalid.

/// `megashard convert CONVERTER --flag value ...`; flags may use `_` for `-`.
int run_convert(int argc, char** argv);
/// `megashard generate`: samples answers to prompts, and writes them as a set of conversations.
int run_generate(int argc, char** argv);
/// `megashard infer`: log-probabilities of a data set and greedy continuations.
int run_infer(int argc, char** argv);
/// `megashard inspect PATH`, or `--diff A B`: shows, verifies or compares checkpoints of any format. Returns 1 for
/// damage or differences.
int run_inspect(int argc, char** argv);
/// `megashard models`: the families of models, and what each can do.
int run_models(int argc, char** argv);
/// `megashard plan`: predicts from a few steps on a device without memory whether a training fits and how fast it is.
int run_plan(int argc, char** argv);
/// `megashard report RUN...`: an HTML page about runs from their files.
int run_report(int argc, char** argv);

}  // namespace megashard
