#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <string>

namespace megashard {

class ProcessGroup;

/// A collective did not end before its group's deadline. Other waits that fail are c10::DistBackendError too: a rank is
/// gone. The cause of either may be another rank's.
class TimeoutError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// The cause in one line: no stack, no source position.
std::string first_line(const std::exception& error);

/// Whether this process has no memory, or may start no thread: neither waiting nor trying again helps.
bool is_short_of_memory(const std::exception& error);
/// Throws c10::OutOfMemoryError for such an error of this rank.
[[noreturn]] void throw_short_of_memory(int rank, const std::exception& error);

/// "rank 1" and "rank 1, which waits for rank 2": ranks of the world, -1 where there is none behind.
std::string name_of_awaited(int rank, int behind);

/// Throws for a wait that failed in `operation`: group, rank, time waited, place (wait_place.h), and what to do about
/// it. `peer`: the rank of the group that was waited for, -1 where that is unknown; `behind`: the rank of the world for
/// which that one waits in the end, -1 where there is none.
[[noreturn]] void throw_wait_error(const char* operation, const ProcessGroup& group, int peer,
                                   std::chrono::steady_clock::duration waited, const std::exception& error,
                                   int behind = -1);

}  // namespace megashard
