#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace megashard {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;  ///< a mistake in flags, configuration files or the environment

/// What stands before the one message in which a program ends.
inline constexpr const char* kErrorPrefix = "megashard: error: ";
/// Set to 1: errors show the stack they come from, and `megashard launch` shows every rank's.
inline constexpr const char* kStackVariable = "MEGASHARD_STACK";
/// Set by `megashard launch`: a descriptor that takes a line with the rank of each process that
/// fails, so that the order of failures is known.
inline constexpr const char* kFailureDescriptor = "MEGASHARD_FAILURE_FD";
/// Ends that line where the process only waited for others in vain.
inline constexpr const char* kOnlyWaited = " waited";

/// What c10::DistError becomes where LibTorch ends: another rank is gone, or all waited in vain for each other.
class PeerLostError : public std::runtime_error {
  using runtime_error::runtime_error;
};

bool show_stack();

/// Runs `program` and returns its exit code. An exception ends in one message on stderr, with the
/// rank before it in a world of several, and kExitUsage for UsageError, kExitFailure otherwise. A
/// UsageError, which all ranks of a host make alike, is printed by the host's first rank only,
/// unless it is an OwnUsageError, or `megashard launch` sorts out who failed first. The other ranks
/// wait for their launcher to end them then: had they left first, torchrun and mpirun would have
/// ended the first rank before its message. One that is still there after `patience` prints too.
int run_program(const std::function<int()>& program, std::chrono::milliseconds patience = std::chrono::seconds(10));

/// A function that ends this process as run_program does at an exception, with kExitFailure; it may be called in a
/// signal handler.
void (*end_in_signal_handler())(const char* message);

/// An exception that nobody catches, as on a thread of a library's, ends the process likewise, unless stacks are asked
/// for.
void end_at_terminate();

/// The message that run_program prints, without prefix: what() without the stack that LibTorch
/// appends.
std::string error_message(const std::exception& error);

}  // namespace megashard
