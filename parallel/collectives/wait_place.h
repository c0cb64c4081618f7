#pragma once

#include <cstdint>
#include <string>

namespace megashard {

/// While it lives, the messages of this thread's waits say where it waits. It keeps pointers: the text is made by waits
/// that last or fail.
class WaitPlace {
 public:
  struct Place {
    const char* phase = nullptr;        ///< "training step"; null: the process's
    int64_t step = -1;                  ///< below 0: none
    const std::string* unit = nullptr;  ///< of FSDP; null: none
  };

  /// `unit` outlives this.
  explicit WaitPlace(const std::string& unit);
  /// A phase that is not the process's, as of a save beside training. `phase` outlives this.
  explicit WaitPlace(const char* phase, int64_t step = -1);
  explicit WaitPlace(const Place& place);  ///< another thread's
  ~WaitPlace();
  WaitPlace(const WaitPlace&) = delete;
  WaitPlace& operator=(const WaitPlace&) = delete;

 private:
  Place outer_;
};

/// What the process does from now on, on whatever thread; `phase` stays as it is.
void enter_phase(const char* phase, int64_t step = -1);

WaitPlace::Place place_of_this_thread();
/// ", unit 'model.layers.0', training step 12", as far as it is known.
std::string text_of_place();

}  // namespace megashard
