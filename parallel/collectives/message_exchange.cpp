#include "parallel/collectives/message_exchange.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "parallel/collectives/group_waits.h"
#include "parallel/collectives/peer_watch.h"
#include "parallel/collectives/process_group.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

constexpr std::chrono::milliseconds kLookEvery{250};
constexpr std::chrono::milliseconds kLongWait = std::chrono::seconds(30);

int64_t whole_seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::round<std::chrono::seconds>(time).count();
}

}  // namespace

MessageExchange::MessageExchange(const Link& link, const char* operation, int tag)
    : link_(link), operation_(operation), tag_(tag), told_after_(std::min(kLongWait, link.group.timeout() / 2)) {}

MessageExchange::~MessageExchange() {
  for (const HostMessage& message : host_messages_)
    if (message.slot != nullptr) link_.host->withdraw(*message.slot);
}

template <typename Call>
auto MessageExchange::or_say_why(int peer, Clock::time_point started, const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    fail(peer, Clock::now() - started, error);
  }
}

void MessageExchange::fail(int peer, Clock::duration waited, const std::exception& error) const {
  try {
    const bool is_alive = waited >= link_.group.timeout();  // as far as known
    throw_wait_error(operation_, link_.group, peer, waited, error, is_alive ? behind(peer) : -1);
  } catch (...) {
    link_.waits.note_failure(std::current_exception());
    throw;
  }
}

int MessageExchange::in_world(int peer) const { return link_.group.ranks()[static_cast<size_t>(peer)]; }

/// World rank that `peer` waits for in the end; itself if it waits for none.
int MessageExchange::behind(int peer) const { return link_.waits.last_awaited_behind(in_world(peer)); }

/// Logs after 30 s (or half the deadline if that is less), then each time the wait has doubled.
void MessageExchange::tell_if_long(int peer, Clock::time_point started) {
  const auto waited = Clock::now() - started;
  if (waited < kLookEvery) return;
  link_.waits.show_wait_for(in_world(peer));
  is_shown_ = true;
  if (waited < told_after_) return;
  told_after_ = 2 * waited;
  const ProcessGroup& group = link_.group;
  link_.waits.tell(c10::str("rank ", in_world(group.rank()), " has waited ", whole_seconds(waited), " s for ",
                            name_of_awaited(in_world(peer), behind(peer)), ": ", operation_, " in group '",
                            group.name(), "'", text_of_place(), "; the run ends after ", whole_seconds(group.timeout()),
                            " s"));
}

void MessageExchange::send(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  if (goes_by_host(peer)) {
    HostMessages::Slot* slot = link_.host->post(bytes.const_data_ptr(), bytes.nbytes(), peer, tag_);
    host_messages_.push_back({std::move(bytes), peer, slot});
    return;
  }
  std::vector<at::Tensor> tensors{std::move(bytes)};
  sends_.push_back({or_say_why(peer, Clock::now(), [&] { return link_.gloo.send(tensors, peer, tag_); }), peer});
}

void MessageExchange::receive(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  if (goes_by_host(peer)) {
    host_messages_.push_back({std::move(bytes), peer, nullptr});
    return;
  }
  std::vector<at::Tensor> tensors{std::move(bytes)};
  receives_.push_back({or_say_why(peer, Clock::now(), [&] { return link_.gloo.recv(tensors, peer, tag_); }), peer});
}

void MessageExchange::wait() {
  link_.waits.throw_if_failed();
  const auto started = Clock::now();
  if (!host_messages_.empty()) {
    wait_for_host(
        started, [&] { return move_host_messages(); }, [&] { return host_messages_.front().peer; });
  }
  for (Message& message : receives_) wait_for(message, started);  // before sends: they name the missing rank
  for (Message& message : sends_) wait_for(message, started);
  receives_.clear();
  sends_.clear();
  show_end();
}

bool MessageExchange::reads_in_place() const {
  for (int peer = 0; peer < link_.group.size(); ++peer)
    if (peer != link_.group.rank() && !goes_by_host(peer)) return false;
  return true;
}

void MessageExchange::expect(size_t bytes, int peer) { expected_.push_back({bytes, peer, nullptr}); }

void MessageExchange::wait_for_expected() {
  link_.waits.throw_if_failed();
  wait_for_host(
      Clock::now(), [&] { return open_expected(); },
      [&] { return std::ranges::find(expected_, nullptr, &Expected::slot)->peer; });
  show_end();
}

const void* MessageExchange::read(int peer, size_t offset, size_t bytes, void* place) const {
  const auto message = std::ranges::find(expected_, peer, &Expected::peer);
  return or_say_why(peer, Clock::now(), [&] { return link_.host->read(*message->slot, peer, offset, bytes, place); });
}

/// Ends the display of a wait; a failed wait stays shown to ranks that wait for this one.
void MessageExchange::show_end() {
  if (std::exchange(is_shown_, false)) link_.waits.show_wait_for(-1);
}

void MessageExchange::close_expected() {
  for (const Expected& message : expected_) link_.host->close(*message.slot, message.peer);
  expected_.clear();
}

template <typename TryAll, typename FirstPeer>
void MessageExchange::wait_for_host(Clock::time_point started, const TryAll& try_all, const FirstPeer& first_peer) {
  while (true) {
    const uint32_t seen = link_.host->news();
    if (try_all()) return;
    const auto waited = Clock::now() - started;
    const auto left = link_.group.timeout() - std::chrono::duration_cast<std::chrono::milliseconds>(waited);
    if (left.count() <= 0) fail(first_peer(), waited, std::runtime_error("timed out"));
    tell_if_long(first_peer(), started);
    link_.host->sleep(seen, std::min(left, kLookEvery));
    if (Clock::now() - started < kLookEvery || link_.host->news() != seen) continue;
    const auto look_at = [&](int peer) { or_say_why(peer, started, [&] { link_.watch.throw_if_gone(peer); }); };
    for (const HostMessage& message : host_messages_) look_at(message.peer);
    for (const Expected& message : expected_) look_at(message.peer);
  }
}

/// Receives available messages and removes complete ones. Returns true if all are complete.
bool MessageExchange::move_host_messages() {
  std::erase_if(host_messages_, [&](HostMessage& message) {
    return or_say_why(message.peer, Clock::now(), [&] {
      if (message.slot != nullptr) return link_.host->is_taken(*message.slot);
      return link_.host->take(message.bytes.mutable_data_ptr(), message.bytes.nbytes(), message.peer, tag_);
    });
  });
  return host_messages_.empty();
}

bool MessageExchange::open_expected() {
  bool all = true;
  for (Expected& message : expected_) {
    if (message.slot == nullptr)
      message.slot =
          or_say_why(message.peer, Clock::now(), [&] { return link_.host->open(message.bytes, message.peer, tag_); });
    all = all && message.slot != nullptr;
  }
  return all;
}

void MessageExchange::wait_for(Message& message, Clock::time_point started) {
  while (message.work != nullptr) {
    const auto deadline = started + link_.group.timeout();
    const bool is_through =
        or_say_why(message.peer, started, [&] { return link_.watch.wait(*message.work, deadline); });
    if (is_through) return message.work.reset();
    tell_if_long(message.peer, started);
    look_at_peers(receives_, started);  // all of them: the awaited peer may live
    look_at_peers(sends_, started);
  }
}

void MessageExchange::look_at_peers(Messages& messages, Clock::time_point started) {
  for (Message& message : messages) {
    if (message.work == nullptr) continue;
    const bool is_through =
        or_say_why(message.peer, started, [&] { return link_.watch.is_through(*message.work, message.peer); });
    if (is_through) message.work.reset();
  }
}

}  // namespace megashard
