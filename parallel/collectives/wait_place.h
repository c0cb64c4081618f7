#pragma once

#include <cstdint>
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

}  // namespace megashard
