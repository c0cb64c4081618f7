#pragma once

#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace megashard {

class FsdpState;
enum class UnitMoment;

/// What the units of a model do in a step, and how long each part of it takes alone: while a trace lives, nothing is
/// prefetched, the host waits for the device at every moment, and for gathers and reductions where they begin. What is
/// computed stays the same. The model's root must have run once, and no step may be running at either end of a trace.
class UnitTrace {
 public:
  explicit UnitTrace(torch::nn::Module& root);
  ~UnitTrace();
  UnitTrace(const UnitTrace&) = delete;
  UnitTrace& operator=(const UnitTrace&) = delete;

  struct Event {
    enum class Kind { kCompute, kGather, kReshard, kReduce };
    Kind kind;
    size_t unit;       ///< in units(); of kCompute: of the event that follows
    bool in_backward;
    double seconds;    ///< 0 of kReshard
    bool operator==(const Event&) const = default;
  };
  /// A module inside a unit whose forward runs by itself, so that it could be a unit of its own.
  struct Part {
    std::string path;
    int64_t gathered_bytes = 0, reduced_bytes = 0;
    double forward_seconds = 0;
    bool runs_again = false;  ///< in backward: it, or what holds it, is recomputed
  };
  struct Unit {
    std::vector<std::string> modules;  ///< as UnitPlan::Unit; the root's has ""
    int64_t gathered_bytes = 0;        ///< of all its parameters, whole, as they are computed with
    int64_t reduced_bytes = 0;         ///< of their gradients
    std::vector<Part> parts;           ///< the direct children that hold a tenth of its bytes or more
  };
  const std::vector<Unit>& units() const;  ///< the root first
  std::vector<Event> take_events();        ///< since the last call

 private:
  class Clock;
  std::shared_ptr<Clock> clock_;
  FsdpState* root_;
};

}  // namespace megashard
