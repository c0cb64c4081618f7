#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard::sim {

/// When operations would run on a machine: a clock for the host, and for each stream the time at
/// which all that was enqueued on it is over. Agents as in sim_device.h. For shapes without memory.
class Timeline {
 public:
  struct Operation {
    const std::string* name;  ///< interned
    double seconds = 0;
    int64_t collective_bytes = 0;  ///< not 0: `name` is a collective's
  };

  /// The host launches it on `agent`.
  void run(int agent, const Operation& operation, const std::string& unit);
  /// When what is enqueued on `agent` is over.
  double over(int agent) const;
  void wait(int agent, double until);
  void host_waits(double until);
  void host_works(double seconds);  ///< not for a launch

  void keep_spans(bool keep) { keeps_spans_ = keep; }
  PlanTotals take_totals();

 private:
  struct Clock {
    double over = 0;           // with its last operation
    double blocked_until = 0;  // by events
  };
  Clock& clock(int agent);
  /// The first time from `ready` on at which the links are free for so long, which then are not.
  double take_links(double ready, double seconds);

  double host_ = 0;
  std::vector<Clock> clocks_;
  std::map<double, double> links_;  // begins and ends of what they carry; not of what is long over
  bool keeps_spans_ = false;
  double taken_at_ = 0;  // of the stream that computes
  PlanTotals totals_;
};

}  // namespace megashard::sim
