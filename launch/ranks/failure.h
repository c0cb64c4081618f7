#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace megashard {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;  ///< a mistake in flags, configuration files or the environment

/// Prefix of the error message with which a program ends.
inline constexpr const char* kErrorPrefix = "megashard: error: ";
/// If set to 1, errors include their stack, and `megashard launch` shows those of every rank.
inline constexpr const char* kStackVariable = "MEGASHARD_STACK";
/// Set by `megashard launch`: a descriptor to which each failing process writes a line with its rank, so that the order
/// of failures is known.
inline constexpr const char* kFailureDescriptor = "MEGASHARD_FAILURE_FD";
/// End of that line if the process failed only because it waited for others.
inline constexpr const char* kOnlyWaited = " waited";

/// Replaces c10::DistError outside LibTorch: another rank is gone, or the ranks waited for each other until the
/// timeout.
class PeerLostError : public std::runtime_error {
  using runtime_error::runtime_error;
};

bool show_stack();

/// Runs `program` and returns its exit code. An exception becomes one message on stderr, with the rank if there are
/// several, and kExitUsage for UsageError, kExitFailure otherwise. A UsageError occurs on all ranks of a host, so only
/// the host's first rank prints it, except an OwnUsageError, or if `megashard launch` selects the first failure. The
/// other ranks then wait to be ended by their launcher: if they exited first, torchrun and mpirun would end the first
/// rank before its message. After `patience` a rank prints it too.
int run_program(const std::function<int()>& program, std::chrono::milliseconds patience = std::chrono::seconds(10));

/// Returns a function that ends this process as run_program does for an exception, with kExitFailure. It may be called
/// in a signal handler.
void (*end_in_signal_handler())(const char* message);

/// Ends the process in the same way for uncaught exceptions, as on a library's thread, unless stacks are requested.
void end_at_terminate();

/// The message that run_program prints, without prefix: what() without LibTorch's stack.
std::string error_message(const std::exception& error);

}  // namespace megashard
