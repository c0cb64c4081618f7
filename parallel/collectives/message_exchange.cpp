#include "parallel/collectives/message_exchange.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "parallel/collectives/peer_watch.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

namespace {

constexpr std::chrono::milliseconds kLookEvery{250};

}  // namespace

MessageExchange::MessageExchange(const Link& link, const char* operation, int tag)
    : link_(link), operation_(operation), tag_(tag) {}

MessageExchange::~MessageExchange() {
  for (const HostMessage& message : host_messages_)
    if (message.slot != nullptr) link_.host->withdraw(*message.slot);
}

template <typename Call>
auto MessageExchange::or_say_why(int peer, Clock::time_point started, const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    throw_wait_error(operation_, link_.group, peer, Clock::now() - started, error);
  }
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
  const auto started = Clock::now();
  if (!host_messages_.empty()) wait_for_host(started);
  for (Message& message : receives_) wait_for(message, started);  // before sends: they name the rank that is missing
  for (Message& message : sends_) wait_for(message, started);
  receives_.clear();
  sends_.clear();
}

void MessageExchange::wait_for_host(Clock::time_point started) {
  while (true) {
    const uint32_t seen = link_.host->news();
    or_say_why(host_messages_.front().peer, started, [&] { move_host_messages(); });
    if (host_messages_.empty()) return;
    const auto waited = Clock::now() - started;
    const auto left = link_.patience - std::chrono::duration_cast<std::chrono::milliseconds>(waited);
    if (left.count() <= 0) {
      throw_wait_error(operation_, link_.group, host_messages_.front().peer, waited, std::runtime_error("timed out"));
    }
    link_.host->sleep(seen, std::min(left, kLookEvery));
    if (Clock::now() - started < kLookEvery || link_.host->news() != seen) continue;
    for (const HostMessage& message : host_messages_)
      or_say_why(message.peer, started, [&] { link_.watch.throw_if_gone(message.peer); });
  }
}

/// Takes what is there, and forgets the messages that are through.
void MessageExchange::move_host_messages() {
  std::erase_if(host_messages_, [&](HostMessage& message) {
    if (message.slot != nullptr) return link_.host->is_taken(*message.slot);
    return link_.host->take(message.bytes.mutable_data_ptr(), message.bytes.nbytes(), message.peer, tag_);
  });
}

void MessageExchange::wait_for(Message& message, Clock::time_point started) {
  while (message.work != nullptr) {
    const bool is_through =
        or_say_why(message.peer, started, [&] { return link_.watch.wait(*message.work, started + link_.patience); });
    if (is_through) return message.work.reset();
    look_at_peers(receives_, started);  // of all: the one that is waited for may live
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
