#include "parallel/sim/timeline.h"

#include <algorithm>
#include <utility>

#include "parallel/sim/settings.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

const int kComputes = agent_of(0);

}  // namespace

Timeline::Clock& Timeline::clock(int agent) {
  const auto place = static_cast<size_t>(agent);
  if (place >= clocks_.size()) clocks_.resize(place + 1);
  return clocks_[place];
}

void Timeline::run(int agent, const Operation& operation, const std::string& unit) {
  host_ += settings().model.host_launch;
  totals_.host_seconds += settings().model.host_launch;
  Clock& stream = clock(agent);
  const double ready = std::max(stream.over, host_);
  double begin = std::max(ready, stream.blocked_until);
  if (operation.collective_bytes > 0) begin = take_links(begin, operation.seconds);
  if (agent == kComputes) totals_.exposed_seconds += begin - ready;
  stream.over = begin + operation.seconds;
  if (operation.collective_bytes > 0) {
    auto found = std::find_if(totals_.collectives.begin(), totals_.collectives.end(),
                              [&](const CollectiveTotal& each) { return each.kind == *operation.name; });
    if (found == totals_.collectives.end())
      found = totals_.collectives.insert(found, CollectiveTotal{.kind = *operation.name});
    ++found->count;
    found->bytes += operation.collective_bytes;
    found->seconds += operation.seconds;
  }
  if (keeps_spans_) totals_.spans.push_back({agent - kComputes, *operation.name, unit, begin, operation.seconds});
}

double Timeline::take_links(double ready, double seconds) {
  double begin = ready;
  for (const auto& [from, to] : links_) {
    if (from >= begin + seconds) break;
    begin = std::max(begin, to);
  }
  links_[begin] = begin + seconds;
  return begin;
}

double Timeline::over(int agent) const {
  const auto place = static_cast<size_t>(agent);
  if (place >= clocks_.size()) return host_;
  return std::max({clocks_[place].over, clocks_[place].blocked_until, host_});
}

void Timeline::wait(int agent, double until) {
  Clock& stream = clock(agent);
  stream.blocked_until = std::max(stream.blocked_until, until);
}

void Timeline::host_waits(double until) { host_ = std::max(host_, until); }

void Timeline::host_works(double seconds) { host_ += seconds; }

PlanTotals Timeline::take_totals() {
  PlanTotals taken = std::exchange(totals_, {});
  const double now = over(kComputes);
  std::erase_if(links_, [&](const auto& each) { return each.second < host_; });
  taken.seconds = now - std::exchange(taken_at_, now);
  return taken;
}

}  // namespace megashard::sim
