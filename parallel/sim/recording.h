#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace megashard::sim {

/// What was enqueued on a device since the host last waited for it, with the order that streams and
/// events give it: for running it again, in another legal order or as a captured graph.
class Recording {
 public:
  /// A point of a recording, for events.
  struct Place {
    uint64_t window = 0;  ///< 0: of none
    size_t node = 0;
  };

  bool on() const { return on_; }
  uint64_t window() const { return window_; }
  bool has_several_streams() const;  ///< or there is one order only
  void start() { on_ = true; }
  /// So that a place of an earlier recording is not taken for one of this.
  void continue_after(const Recording& earlier) { window_ = earlier.window_ + 1; }
  void stop();  ///< and forgets what is recorded

  /// `after`: nodes, besides those before it on its stream, that it must follow.
  Place add(int agent, const std::string& name, const std::vector<Place>& after, std::function<void()> work);
  /// What a wait for everything on `agent` so far waits for.
  Place mark(int agent);
  void wait(int agent, const Place& place);

  void run_in_order() const;
  /// Draws, at each turn, one of the streams whose next node has nothing to wait for.
  void run_in_random_order(uint64_t seed) const;

 private:
  struct Node {
    int agent;
    const std::string* name;
    std::vector<size_t> after;   // nodes of other streams
    std::function<void()> work;  // empty: a mark or a wait
  };

  bool on_ = false;
  uint64_t window_ = 1;
  std::vector<Node> nodes_;
};

}  // namespace megashard::sim
