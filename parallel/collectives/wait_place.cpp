#include "parallel/collectives/wait_place.h"

#include <atomic>

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

}  // namespace megashard
