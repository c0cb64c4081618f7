#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace megashard {

class ProcessGroup;

/// Is in every sentence of throw_wait_error: the cause may be another rank's.
inline constexpr const char* kPeerIsMissing =
    "a rank died or ran a different number of collectives";

/// The cause in one line: no stack, no source position.
std::string first_line(const std::exception& error);

/// Throws the sentence for a wait that failed in `operation`: group, rank, time waited, and what to
/// do about it. `peer`: the rank of the group that was waited for, -1 where that is unknown.
[[noreturn]] void throw_wait_error(const char* operation, const ProcessGroup& group, int peer,
                                   std::chrono::steady_clock::duration waited,
                                   const std::exception& error);

}  // namespace megashard
