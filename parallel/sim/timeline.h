#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/device/device_plan.h"

namespace megashard::sim {

/// Time at which operations would run on a machine: a clock for the host, and for each stream the completion time of
/// its enqueued work. Agents as in sim_device.h. For shapes without memory.
class Timeline {
 public:
  struct Operation {
    const std::string* name;  ///< interned
    double seconds = 0;
    int64_t collective_bytes = 0;  ///< not 0 for a collective, which is `name`
  };

  /// The host launches an operation on `agent`.
  void run(int agent, const Operation& operation, const std::string& unit);
  /// Completion time of the work enqueued on `agent`.
  double over(int agent) const;
  void wait(int agent, double until);
  void host_waits(double until);
  void host_works(double seconds);  ///< other than launches

  void keep_spans(bool keep) { keeps_spans_ = keep; }
  PlanTotals take_totals();

 private:
  struct Clock {
    double over = 0;           // completion of its last operation
    double blocked_until = 0;  // by events
  };
  Clock& clock(int agent);
  /// Reserves the links for `seconds` at the first possible time from `ready` on, and returns that time.
  double take_links(double ready, double seconds);

  double host_ = 0;
  std::vector<Clock> clocks_;
  std::map<double, double> links_;  // begin and end of reservations, without those long over
  bool keeps_spans_ = false;
  double taken_at_ = 0;  // time of the compute stream
  PlanTotals totals_;
};

}  // namespace megashard::sim
