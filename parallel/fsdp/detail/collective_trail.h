#pragma once

#include <atomic>
#include <memory>
#include <string>

namespace megashard {

/// What a root's groups did in the step at hand, in host order, for CollectiveOrder. One thread writes at a time;
/// another may read the first `count` of them meanwhile.
struct CollectiveTrail {
  struct Event {
    const char* what;
    const std::string* group;  // its name, as long as the group lives
  };
  static constexpr size_t kMost = 1 << 14;  // what comes after them is not looked at

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
