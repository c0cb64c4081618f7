#include "parallel/collectives/gloo_exchange.h"

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "parallel/collectives/peer_watch.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

GlooExchange::GlooExchange(const Link& link, const char* operation, int tag)
    : link_(link), operation_(operation), tag_(tag) {}

template <typename Call>
auto GlooExchange::or_say_why(int peer, Clock::time_point started, const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    throw_wait_error(operation_, link_.group, peer, Clock::now() - started, error);
  }
}

void GlooExchange::send(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  std::vector<at::Tensor> tensors{std::move(bytes)};
  sends_.push_back({or_say_why(peer, Clock::now(), [&] { return link_.gloo.send(tensors, peer, tag_); }), peer});
}

void GlooExchange::receive(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  std::vector<at::Tensor> tensors{std::move(bytes)};
  receives_.push_back({or_say_why(peer, Clock::now(), [&] { return link_.gloo.recv(tensors, peer, tag_); }), peer});
}

void GlooExchange::wait() {
  const auto started = Clock::now();
  for (Message& message : receives_) wait_for(message, started);
  for (Message& message : sends_) wait_for(message, started);
  receives_.clear();
  sends_.clear();
}

void GlooExchange::wait_for(Message& message, Clock::time_point started) {
  while (message.work != nullptr) {
    const bool is_through =
        or_say_why(message.peer, started, [&] { return link_.watch.wait(*message.work, started + link_.patience); });
    if (is_through) return message.work.reset();
    look_at_peers(receives_, started);  // of all: the one that is waited for may live
    look_at_peers(sends_, started);
  }
}

void GlooExchange::look_at_peers(Messages& messages, Clock::time_point started) {
  for (Message& message : messages) {
    if (message.work == nullptr) continue;
    const bool is_through =
        or_say_why(message.peer, started, [&] { return link_.watch.is_through(*message.work, message.peer); });
    if (is_through) message.work.reset();
  }
}

}  // namespace megashard
