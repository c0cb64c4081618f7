#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>

namespace megashard {

/// Scope whose place is named by messages about this thread's waits. Keeps pointers only: the text is built for waits
/// that are long or fail.
class WaitPlace {
 public:
  struct Place {
    const char* phase = nullptr;        ///< "training step"; null: the process's phase
    int64_t step = -1;                  ///< negative: none
    const std::string* unit = nullptr;  ///< FSDP unit; null: none
  };

  /// `unit` outlives this.
  explicit WaitPlace(const std::string& unit);
  /// A phase other than the process's, e.g. of a save besides training. `phase` outlives this.
  explicit WaitPlace(const char* phase, int64_t step = -1);
  explicit WaitPlace(const Place& place);  ///< another thread's place
  ~WaitPlace();
  WaitPlace(const WaitPlace&) = delete;
  WaitPlace& operator=(const WaitPlace&) = delete;

 private:
  Place outer_;
};

/// Sets the phase of the process for all threads; `phase` must stay valid.
void enter_phase(const char* phase, int64_t step = -1);

WaitPlace::Place place_of_this_thread();
/// ", unit 'model.layers.0', training step 12", as far as known.
std::string text_of_place();

/// Message of an exception without the stack that LibTorch's exceptions add to what().
std::string error_text(const std::exception& error);

class ProcessGroup;

/// A collective did not end before its group's deadline. Other failed waits are c10::DistBackendError, too: a rank is
/// gone. The cause of either may lie on another rank.
class TimeoutError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// First line of the cause: no stack, no source position.
std::string first_line(const std::exception& error);

/// True if this process is out of memory or cannot start threads: neither waiting nor retrying helps.
bool is_short_of_memory(const std::exception& error);
/// Its message while the rank connects, with the remedy.
std::string short_of_memory(int rank, const std::exception& error);
/// Throws c10::OutOfMemoryError for such an error on this rank.
[[noreturn]] void throw_short_of_memory(int rank, const std::exception& error);

/// "rank 1" or "rank 1, which waits for rank 2", in world ranks; `behind` -1: waits for none.
std::string name_of_awaited(int rank, int behind);

/// Throws the error for a failed wait in `operation`: group, rank, time waited, place (text_of_place) and remedy.
/// `peer`: group rank that was waited for, -1 if unknown; `behind`: world rank that `peer` waits for in the end, -1 if
/// none.
[[noreturn]] void throw_wait_error(const char* operation, const ProcessGroup& group, int peer,
                                   std::chrono::steady_clock::duration waited, const std::exception& error,
                                   int behind = -1);

}  // namespace megashard
