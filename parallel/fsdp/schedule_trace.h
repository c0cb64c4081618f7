#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace megashard {

/// Records when each group of a sharded model is unsharded, resharded and reduced, in host order, for tests and for
/// Chrome's tracing page or Perfetto. Replaces the model's schedule observer while it lives. Destroy it before the
/// model and not during a step.
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

  /// Writes JSON in Chrome's trace event format: a bar while a group is unsharded, marks for its backward and
  /// reduction. `rank` names the process.
  void write_chrome_trace(const std::string& path, int rank) const;

 private:
  torch::nn::Module& root_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace megashard
