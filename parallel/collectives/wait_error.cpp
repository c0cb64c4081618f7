#include "parallel/collectives/wait_error.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <new>
#include <system_error>

#include "parallel/collectives/process_group.h"

namespace megashard {
namespace {

thread_local WaitPlace::Place here;
std::atomic<const char*> phase_of_process = nullptr;
std::atomic<int64_t> step_of_process = -1;

}  // namespace

WaitPlace::WaitPlace(const std::string& unit) : outer_(here) { here.unit = &unit; }

WaitPlace::WaitPlace(const char* phase, int64_t step) : WaitPlace(Place{.phase = phase, .step = step}) {}

WaitPlace::WaitPlace(const Place& place) : outer_(here) { here = place; }

WaitPlace::~WaitPlace() { here = outer_; }

void enter_phase(const char* phase, int64_t step) {
  phase_of_process = phase;
  step_of_process = step;
}

WaitPlace::Place place_of_this_thread() {
  WaitPlace::Place place = here;
  if (place.phase == nullptr) {
    place.phase = phase_of_process;
    place.step = step_of_process;
  }
  return place;
}

std::string text_of_place() {
  const auto place = place_of_this_thread();
  std::string text;
  if (place.unit != nullptr) text += ", unit '" + *place.unit + "'";
  if (place.phase != nullptr) text += std::string(", ") + place.phase;
  if (place.phase != nullptr && place.step >= 0) text += " " + std::to_string(place.step);
  return text;
}

std::string error_text(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

std::string first_line(const std::exception& error) {
  std::string text = error_text(error);
  text = text.substr(0, text.find('\n'));
  // Gloo's messages begin with "[/path/file.cc:123] ".
  const size_t end_of_position = text.find("] ");
  if (text.starts_with('[') && end_of_position != std::string::npos) text.erase(0, end_of_position + 2);
  while (!text.empty() && (text.back() == '.' || text.back() == ' ')) text.pop_back();
  return text;
}

std::string name_of_awaited(int rank, int behind) {
  return "rank " + std::to_string(rank) +
         (behind < 0 || behind == rank ? "" : ", which waits for rank " + std::to_string(behind));
}

bool is_short_of_memory(const std::exception& error) {
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  const bool has_no_thread = system != nullptr && system->code() == std::errc::resource_unavailable_try_again;
  if (has_no_thread || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  const std::string text = error_text(error);  // Gloo wraps what its connections throw
  return text.find("Cannot allocate memory") != std::string::npos || text.find("std::bad_alloc") != std::string::npos;
}

std::string short_of_memory(int rank, const std::exception& error) {
  return "rank " + std::to_string(rank) + " has no memory, or may start no thread, to connect to the other ranks [" +
         first_line(error) + "]: allow it more (ulimit -v, ulimit -u, the limits of the job or the container), or " +
         "start fewer ranks on its machine";
}

void throw_short_of_memory(int rank, const std::exception& error) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, short_of_memory(rank, error));
}

void throw_wait_error(const char* operation, const ProcessGroup& group, int peer,
                      std::chrono::steady_clock::duration waited, const std::exception& error, int behind) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.1f", std::chrono::duration<double>(waited).count());
  const auto in_world = [&](int rank) { return group.ranks()[static_cast<size_t>(rank)]; };
  const std::string whom = peer < 0 ? "" : " for " + name_of_awaited(in_world(peer), behind);
  const auto message =
      c10::str(operation, " in group '", group.name(), "' failed on rank ", in_world(group.rank()), " after waiting ",
               seconds, " s", whom, text_of_place(), ": a rank died or ran a different number of collectives, or it ",
               "needs longer (raise --distributed-timeout-minutes) [", first_line(error), "]");
  if (waited >= group.timeout()) throw TimeoutError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
  C10_THROW_ERROR(DistBackendError, message);
}

}  // namespace megashard
