#pragma once

/// Runs `megashard SUBCOMMAND ...` for every subcommand that needs LibTorch; argv[1] is the
/// subcommand, or --help. Lives in a library of its own that main.cpp loads: `launch` and
/// `--version` do not wait 0.3 s for LibTorch. Throws what the subcommand throws, but for
/// c10::Error, which comes as std::runtime_error with its message.
extern "C" int megashard_run(int argc, char** argv);
