#include "parallel/sim/recording.h"

#include <algorithm>
#include <deque>
#include <random>
#include <utility>

namespace megashard::sim {

void Recording::stop() {
  on_ = false;
  nodes_.clear();
  ++window_;
}

bool Recording::has_several_streams() const {
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [&](const Node& node) { return node.agent != nodes_.front().agent; });
}

Recording::Place Recording::add(int agent, const std::string& name, const std::vector<Place>& after,
                                std::function<void()> work) {
  if (!on_) return {};
  Node node{agent, &name, {}, std::move(work)};
  for (const Place& place : after) {
    if (place.window == window_ && nodes_[place.node].agent != agent) node.after.push_back(place.node);
  }
  nodes_.push_back(std::move(node));
  return {window_, nodes_.size() - 1};
}

Recording::Place Recording::mark(int agent) {
  if (!on_) return {};
  static const std::string name = "event";
  nodes_.push_back({agent, &name, {}, {}});
  return {window_, nodes_.size() - 1};
}

void Recording::wait(int agent, const Place& place) {
  if (!on_ || place.window != window_) return;  // from an earlier window: complete
  static const std::string name = "wait";
  nodes_.push_back({agent, &name, {place.node}, {}});
}

void Recording::run_in_order() const {
  for (const Node& node : nodes_) {
    if (node.work) node.work();
  }
}

void Recording::run_in_random_order(uint64_t seed) const {
  std::map<int, std::deque<size_t>> streams;
  for (size_t i = 0; i < nodes_.size(); ++i) streams[nodes_[i].agent].push_back(i);
  std::vector<bool> done(nodes_.size());
  std::mt19937_64 random(seed * 1000003 + window_);
  const auto ready = [&](const std::deque<size_t>& queue) {
    for (const size_t earlier : nodes_[queue.front()].after) {
      if (!done[earlier]) return false;
    }
    return true;
  };
  while (!streams.empty()) {
    auto stream = streams.begin();
    std::advance(stream, random() % streams.size());
    // The first remaining node of the recording is always ready, so some stream is.
    while (!ready(stream->second)) {
      if (++stream == streams.end()) stream = streams.begin();
    }
    const size_t next = stream->second.front();
    stream->second.pop_front();
    if (stream->second.empty()) streams.erase(stream);
    if (nodes_[next].work) nodes_[next].work();
    done[next] = true;
  }
}

}  // namespace megashard::sim
