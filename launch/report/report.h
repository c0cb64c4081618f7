#pragma once

namespace megashard {

/// Runs `megashard report RUN...`: an HTML page about runs from their files; argv[0] is the subcommand. Returns the
/// exit code. Throws UsageError for wrong flags and for missing or invalid files.
int run_report(int argc, char** argv);

}  // namespace megashard
