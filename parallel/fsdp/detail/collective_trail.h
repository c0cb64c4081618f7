#pragma once

#include <atomic>
#include <memory>
#include <string>

namespace megashard {

/// Log of what a root's groups did in the current step, in host order, for CollectiveOrder. One writer at a time;
/// another thread may read the first `count` events meanwhile.
struct CollectiveTrail {
  struct Event {
    const char* what;
    const std::string* group;  // the group's name; valid while the group lives
  };
  static constexpr size_t kMost = 1 << 14;  // later events are dropped

  std::unique_ptr<Event[]> events = std::make_unique<Event[]>(kMost);
  std::atomic<size_t> count{0};
  std::atomic<bool> is_on{false};

  void note(const char* what, const std::string& group) {
    const size_t place = count.load(std::memory_order_relaxed);
    if (!is_on.load(std::memory_order_relaxed) || place == kMost) return;
    events[place] = {what, &group};
    count.store(place + 1, std::memory_order_release);
  }
};

}  // namespace megashard
