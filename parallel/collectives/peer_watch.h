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

/// Notices within a second that a peer died while this rank waits for a message to or from it.
/// Gloo itself tells only those messages of a closed connection that have not begun: the others
/// would wait until the deadline.
class PeerWatch {
 public:
  /// Tag of a receive that is posted to each peer that is slow, and never answered: it has not
  /// begun. No message may bear it.
  static constexpr int kTag = 0;

  explicit PeerWatch(c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo);
  /// Waits for a message of the group's; throws what Gloo says at the deadline. False after half a
  /// second at most: it is time to look whether the peers live.
  bool wait(c10d::Work& message, std::chrono::steady_clock::time_point deadline);
  /// Throws when the connection to `peer` is closed, unless `message`, one to or from it, is
  /// through all the same: then true, and nobody may wait for it any more.
  bool is_through(c10d::Work& message, int peer);
  void throw_if_gone(int peer);  ///< what Gloo says of a closed connection

 private:
  class Pulse;

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::vector<c10::intrusive_ptr<c10d::Work>> unanswered_;  // by peer; null: not posted yet
  std::shared_ptr<Pulse> pulse_;
};

}  // namespace megashard
