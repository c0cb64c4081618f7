#pragma once

/// Runs `megashard SUBCOMMAND ...` for subcommands that need LibTorch; argv[1] is the subcommand or --help. Located in
/// a library that main.cpp loads, so that `launch` and `--version` do not spend 0.3 s loading LibTorch. Throws the
/// subcommand's exceptions; c10::Error becomes std::runtime_error with its message.
extern "C" int megashard_run(int argc, char** argv);
