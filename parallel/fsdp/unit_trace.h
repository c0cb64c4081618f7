#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace megashard {

class FsdpState;
enum class UnitMoment;

/// Measures what each unit does in a step and how long each part takes alone: while a trace lives, nothing is
/// prefetched and the host waits for the device at every event, and for all-gathers and reductions right where they
/// start. Results stay the same. Construct after the root has run once; construct and destroy outside steps.
class UnitTrace {
 public:
  explicit UnitTrace(torch::nn::Module& root);
  ~UnitTrace();
  UnitTrace(const UnitTrace&) = delete;
  UnitTrace& operator=(const UnitTrace&) = delete;

  struct Event {
    enum class Kind { kCompute, kGather, kReshard, kReduce };
    Kind kind;
    size_t unit;  ///< index in units(); for kCompute: unit of the next event
    bool in_backward;
    double seconds;  ///< 0 for kReshard
    bool operator==(const Event&) const = default;
  };
  /// Module inside a unit that has hooks of its own, so that it could become a unit.
  struct Part {
    std::string path;
    int64_t gathered_bytes = 0, reduced_bytes = 0;
    double forward_seconds = 0;
    bool runs_again = false;  ///< it, or a module around it, is recomputed in backward
  };
  struct Unit {
    std::vector<std::string> modules;  ///< as in UnitPlan::Unit; [""] for the root
    int64_t gathered_bytes = 0;        ///< its parameters, unsharded, in the compute dtype
    int64_t reduced_bytes = 0;         ///< their gradients
    std::vector<Part> parts;           ///< direct children with at least a tenth of its bytes
  };
  const std::vector<Unit>& units() const;  ///< the root is the first
  std::vector<Event> take_events();        ///< events since the last call

 private:
  class Clock;
  std::shared_ptr<Clock> clock_;
  FsdpState* root_;
};

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
