#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroupGloo;
class Work;
}  // namespace c10d

namespace megashard {

/// Detects within a second that a peer died while this rank waits for a message to or from it. When a connection
/// closes, Gloo itself fails only messages that have not begun; others would wait until the deadline.
class PeerWatch {
 public:
  /// Tag of a receive that is posted to each slow peer and never matched, so that it never begins. No other message may
  /// use it.
  static constexpr int kTag = 0;

  explicit PeerWatch(c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo);
  /// Waits for a message of the group; throws Gloo's error at the deadline. Returns false after at most half a second,
  /// so that the caller can check the peers.
  bool wait(c10d::Work& message, std::chrono::steady_clock::time_point deadline);
  /// Throws if the connection to `peer` is closed, unless `message`, to or from it, is complete anyway: then returns
  /// true, and the message must not be waited for any more.
  bool is_through(c10d::Work& message, int peer);
  void throw_if_gone(int peer);  ///< throws Gloo's error for a closed connection

 private:
  class Pulse;

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::vector<c10::intrusive_ptr<c10d::Work>> unanswered_;  // by peer; null: not posted yet
  std::shared_ptr<Pulse> pulse_;
};

}  // namespace megashard
