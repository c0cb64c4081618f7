#include "parallel/collectives/gloo_exchange.h"

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "parallel/collectives/peer_watch.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

GlooExchange::GlooExchange(const Link& link, const char* operation, int tag)
    : link_(link), operation_(operation), tag_(tag) {}

void GlooExchange::send(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  std::vector<at::Tensor> tensors{std::move(bytes)};
  const auto started = Clock::now();
  try {
    sends_.push_back({link_.gloo.send(tensors, peer, tag_), peer});
  } catch (const std::exception& error) {
    throw_wait_error(operation_, link_.group, peer, Clock::now() - started, error);
  }
}

void GlooExchange::receive(at::Tensor bytes, int peer) {
  if (bytes.numel() == 0) return;
  std::vector<at::Tensor> tensors{std::move(bytes)};
  const auto started = Clock::now();
  try {
    receives_.push_back({link_.gloo.recv(tensors, peer, tag_), peer});
  } catch (const std::exception& error) {
    throw_wait_error(operation_, link_.group, peer, Clock::now() - started, error);
  }
}

void GlooExchange::wait() {
  const auto started = Clock::now();
  for (const Message& message : receives_) wait_for(message, started);
  for (const Message& message : sends_) wait_for(message, started);
  receives_.clear();
  sends_.clear();
}

void GlooExchange::wait_for(const Message& message, Clock::time_point started) {
  try {
    link_.watch.wait(*message.work, message.peer, started + link_.patience);
  } catch (const std::exception& error) {
    throw_wait_error(operation_, link_.group, message.peer, Clock::now() - started, error);
  }
}

}  // namespace megashard
