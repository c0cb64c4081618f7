#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace megashard::sim {

/// Operations enqueued on a device since the host last waited for it, with their order by streams and events; replayed
/// in another legal order or as a captured graph.
class Recording {
 public:
  /// Position in a recording, for events.
  struct Place {
    uint64_t window = 0;  ///< 0: none
    size_t node = 0;
  };

  bool on() const { return on_; }
  uint64_t window() const { return window_; }
  bool has_several_streams() const;  ///< otherwise there is only one order
  void start() { on_ = true; }
  /// Makes places of the earlier recording differ from this one's.
  void continue_after(const Recording& earlier) { window_ = earlier.window_ + 1; }
  void stop();  ///< also clears the recording

  /// `after`: nodes that it must follow, besides earlier ones on its stream.
  Place add(int agent, const std::string& name, const std::vector<Place>& after, std::function<void()> work);
  /// Place to wait for to wait for everything on `agent` so far.
  Place mark(int agent);
  void wait(int agent, const Place& place);

  void run_in_order() const;
  /// At each turn picks a random stream among those whose next node is ready.
  void run_in_random_order(uint64_t seed) const;

 private:
  struct Node {
    int agent;
    const std::string* name;
    std::vector<size_t> after;   // nodes on other streams
    std::function<void()> work;  // empty: a mark or a wait
  };

  bool on_ = false;
  uint64_t window_ = 1;
  std::vector<Node> nodes_;
};

}  // namespace megashard::sim
