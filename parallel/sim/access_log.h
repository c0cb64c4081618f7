#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/sim/vector_clock.h"

namespace megashard::sim {

/// One operation as the log keeps it.
struct Access {
  int agent = -1;                          ///< of the device; -1: none
  uint64_t time = 0;                       ///< of that agent
  const std::string* operation = nullptr;  ///< interned
  const std::string* stack = nullptr;      ///< interned; null: not asked for
  const std::string* name = nullptr;       ///< of the memory, interned; null: not known
  bool of_earlier_owner = false;           ///< before the block was handed out again
};

/// The last accesses to every byte of one device, and to the pinned memory that its streams use.
class AccessLog {
 public:
  /// Called with the earlier access that no event orders before this one.
  using Report = std::function<void(const Access& earlier, bool earlier_wrote)>;

  /// `seen`: what the accessing stream knows.
  void read(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen, const Report& report);
  void write(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen, const Report& report);
  /// The block was handed out again: its bytes are undefined from here on. `window`: see settled().
  void hand_out(uintptr_t begin, size_t bytes, uint64_t window);
  void forget(uintptr_t begin, size_t bytes);

  /// Calls `each` with every range whose bytes were not undefined in `window` for the last time.
  void settled(uintptr_t begin, size_t bytes, uint64_t window,
               const std::function<void(uintptr_t begin, size_t bytes, const Access& writer)>& each) const;

 private:
  struct Span {
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;  // since the write, the last of each agent
    uint64_t undefined_in = 0;  // the window in which it was handed out; 0: written since
  };
  using Spans = std::map<uintptr_t, Span>;
  static Span span_until(uintptr_t end);

  void cut(uintptr_t at);
  /// Calls visit for the spans that make up the range, after making them.
  template <class Visit>
  void over(uintptr_t begin, size_t bytes, const Visit& visit);

  Spans spans_;
};

}  // namespace megashard::sim
