#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <vector>

#include "parallel/collectives/host_messages.h"

namespace c10d {
class ProcessGroupGloo;
class Work;
}  // namespace c10d

namespace megashard {

class GroupWaits;
class PeerWatch;
class ProcessGroup;

/// Messages in flight between this rank and its peers, all with the tag of one collective and at most one per peer and
/// direction. Reusable after wait(), because messages between two ranks with one tag keep their order. Throws the
/// errors of wait_error.h.
class MessageExchange {
 public:
  /// Transport of `group`. Its ranks use the same tag for the same collective, never PeerWatch::kTag.
  struct Link {
    const ProcessGroup& group;
    c10d::ProcessGroupGloo& gloo;
    HostMessages* host;  // null: all messages go through Gloo
    PeerWatch& watch;
    GroupWaits& waits;
  };
  MessageExchange(const Link& link, const char* operation, int tag);
  MessageExchange(MessageExchange&&) = default;
  MessageExchange& operator=(MessageExchange&&) = delete;
  ~MessageExchange();  ///< withdraws messages that were not waited for

  void send(at::Tensor bytes, int peer);
  void receive(at::Tensor bytes, int peer);
  /// Blocks until all messages are complete. Peers on this machine have then completed their waits, or are in them.
  void wait();

  /// True if messages of every peer can be read in place.
  bool reads_in_place() const;
  /// Message to read in place: wait for all of them, read, close them, then call wait().
  void expect(size_t bytes, int peer);
  void wait_for_expected();
  const void* read(int peer, size_t offset, size_t bytes, void* place) const;  ///< HostMessages::read
  void close_expected();

 private:
  using Clock = std::chrono::steady_clock;
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;  // null: complete
    int peer;
  };
  using Messages = std::vector<Message>;
  struct HostMessage {
    at::Tensor bytes;
    int peer;
    HostMessages::Slot* slot;  // null: received
  };
  struct Expected {
    size_t bytes;
    int peer;
    HostMessages::Slot* slot;  // null: not posted yet
  };
  /// Returns the result of a call to Gloo; throws the message for its failure.
  template <typename Call>
  auto or_say_why(int peer, Clock::time_point started, const Call& call) const;
  [[noreturn]] void fail(int peer, Clock::duration waited, const std::exception& error) const;
  int in_world(int peer) const;
  int behind(int peer) const;
  void tell_if_long(int peer, Clock::time_point started);
  void show_end();
  bool goes_by_host(int peer) const { return link_.host != nullptr && link_.host->reaches(peer); }
  /// Waits for peers on this machine until try_all() is true; first_peer() names one that is still missing.
  template <typename TryAll, typename FirstPeer>
  void wait_for_host(Clock::time_point started, const TryAll& try_all, const FirstPeer& first_peer);
  bool move_host_messages();
  bool open_expected();
  void wait_for(Message& message, Clock::time_point started);
  void look_at_peers(Messages& messages, Clock::time_point started);

  Link link_;
  const char* operation_;
  int tag_;
  Clock::duration told_after_;  // minimum duration of a wait that is logged
  bool is_shown_ = false;       // to other ranks
  std::vector<HostMessage> host_messages_;
  std::vector<Expected> expected_;
  Messages sends_;
  Messages receives_;
};

}  // namespace megashard
