#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace megashard {

/// Records when each group of a sharded model was gathered, freed and reduced, in host order, for
/// tests and for a look at a step in Chrome's tracing page or Perfetto. Takes the place of the
/// model's schedule observer while it lives; outlives neither the model nor a running step.
class ScheduleTrace {
 public:
  explicit ScheduleTrace(torch::nn::Module& root);
  ~ScheduleTrace();
  ScheduleTrace(const ScheduleTrace&) = delete;
  ScheduleTrace& operator=(const ScheduleTrace&) = delete;

  struct Event {
    std::string what;   ///< "unshard", "reshard", "pre_backward", "post_backward", "reduce"
    std::string group;  ///< path of the unit
    double microseconds;
  };
  std::vector<Event> events() const;
  void clear();

  /// JSON in Chrome's trace event format: a bar for as long as a group is gathered, and marks for
  /// its backward and reduction. `rank` names the process.
  void write_chrome_trace(const std::string& path, int rank) const;

 private:
  torch::nn::Module& root_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace megashard
