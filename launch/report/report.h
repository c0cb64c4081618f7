#pragma once

namespace megashard {

/// `megashard report RUN...`: an HTML page about runs, from the files that they write; argv[0] is the subcommand.
/// Returns the exit code. Throws UsageError for wrong flags, and for files that are not there or hold something else.
int run_report(int argc, char** argv);

}  // namespace megashard
