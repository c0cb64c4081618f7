#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parallel/sim/vector_clock.h"

namespace megashard::sim {

/// Log entry of one operation.
struct Access {
  int agent = -1;                          ///< agent of the device; -1: none
  uint64_t time = 0;                       ///< the agent's time
  const std::string* operation = nullptr;  ///< interned
  const std::string* stack = nullptr;      ///< interned; null: not recorded
  const std::string* name = nullptr;       ///< name of the memory, interned; null: not known
  bool of_earlier_owner = false;           ///< before the block was reused
};

/// Last accesses to every byte of one device and of the pinned memory that its streams use.
class AccessLog {
 public:
  /// Called with an earlier access that no event orders before the current one.
  using Report = std::function<void(const Access& earlier, bool earlier_wrote)>;

  /// `seen`: clock of the accessing stream.
  void read(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen, const Report& report);
  void write(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen, const Report& report);
  /// The block was reused: its bytes are undefined from now on. `window`: see settled().
  void hand_out(uintptr_t begin, size_t bytes, uint64_t window);
  void forget(uintptr_t begin, size_t bytes);

  /// Calls `each` for every range whose bytes were not left undefined in `window`.
  void settled(uintptr_t begin, size_t bytes, uint64_t window,
               const std::function<void(uintptr_t begin, size_t bytes, const Access& writer)>& each) const;

 private:
  struct Span {
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;  // since the write; the last one of each agent
    uint64_t undefined_in = 0;  // window in which it was allocated; 0: written since
  };
  using Spans = std::map<uintptr_t, Span>;
  static Span span_until(uintptr_t end);

  void cut(uintptr_t at);
  /// Splits spans as needed and calls visit for those of the range.
  template <class Visit>
  void over(uintptr_t begin, size_t bytes, const Visit& visit);

  Spans spans_;
};

}  // namespace megashard::sim
