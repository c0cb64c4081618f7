#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace megashard::sim {

/// Clock of one agent (the host or a stream) of a device: per agent, the number of operations known to be complete.
class VectorClock {
 public:
  uint64_t at(size_t agent) const { return agent < times_.size() ? times_[agent] : 0; }

  uint64_t advance(size_t agent) {
    if (agent >= times_.size()) times_.resize(agent + 1);
    return ++times_[agent];
  }

  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint64_t> times_;
};

}  // namespace megashard::sim
