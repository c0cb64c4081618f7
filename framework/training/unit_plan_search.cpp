#include "framework/training/unit_plan_search.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace megashard {
namespace {

using Event = UnitTrace::Event;
using Kind = Event::Kind;

/// What the plan gathers and reduces as one.
struct Group {
  int64_t gathered_bytes = 0, reduced_bytes = 0;
  int members = 0;  // traced units, or one part of one
};

/// Where the parameters of a traced unit go.
struct Place {
  size_t group;               // of the unit, or of what its parts leave
  std::vector<size_t> parts;  // groups; empty: the unit is not split
  std::vector<double> shares;
};

struct Step {
  Kind kind;
  size_t group;
  bool in_backward;
  double seconds;
};

class Replay {
 public:
  Replay(const StepTrace& trace, const LinkCosts& link, const UnitPlan& plan, bool host_runs_ahead)
      : link_(link),
        forward_ahead_(std::max(plan.forward_prefetch, host_runs_ahead ? 1 : 0)),
        backward_ahead_(std::max(plan.backward_prefetch, 1)) {
    place_units(trace, plan);
    add_steps(trace);
  }

  PlanForecast run() {
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      if (step.kind == Kind::kCompute) {
        computed_ += step.seconds;
      } else if (step.kind == Kind::kGather) {
        gather(i);
      } else if (step.kind == Kind::kReshard) {
        free(step.group);
      } else {
        reduce(step.group);
      }
    }
    forecast_.exposed += std::max(0.0, link_free_ - computed_);
    forecast_.seconds = std::max(computed_, link_free_);
    return forecast_;
  }

 private:
  void place_units(const StepTrace& trace, const UnitPlan& plan) {
    std::map<std::string, size_t> group_of;
    groups_.resize(plan.units.size() + 1);  // the root's first
    for (size_t i = 0; i < plan.units.size(); ++i) {
      for (const auto& path : plan.units[i]) group_of.emplace(path, i + 1);
    }
    for (const auto& unit : trace.units) {
      const auto own = group_of.find(unit.modules.front());
      Place place{own == group_of.end() ? 0 : own->second, {}, {}};
      int64_t gathered = unit.gathered_bytes, reduced = unit.reduced_bytes;
      double forward = 0;
      for (const auto& part : unit.parts) {
        const auto found = group_of.find(part.path);
        if (found == group_of.end()) continue;
        place.parts.push_back(found->second);
        place.shares.push_back(part.forward_seconds);
        forward += part.forward_seconds;
        groups_[found->second] = {part.gathered_bytes, part.reduced_bytes, 1};
        gathered -= part.gathered_bytes;
        reduced -= part.reduced_bytes;
      }
      for (double& share : place.shares) share = forward > 0 ? share / forward : 1.0 / place.shares.size();
      Group& group = groups_[place.group];
      group.gathered_bytes += gathered;
      group.reduced_bytes += reduced;
      ++group.members;
      places_.push_back(std::move(place));
    }
  }

  void add_steps(const StepTrace& trace) {
    std::vector<int> resharded(groups_.size()), reduced(groups_.size());
    for (size_t i = 0; i < trace.events.size(); ++i) {
      const Event& event = trace.events[i];
      const Place& place = places_[event.unit];
      const bool after_gather = i > 0 && trace.events[i - 1].kind == Kind::kGather;
      if (event.kind == Kind::kCompute && after_gather && !places_[trace.events[i - 1].unit].parts.empty()) {
        add_parts(places_[trace.events[i - 1].unit], event);
        continue;
      }
      const bool ends = event.kind == Kind::kReshard || event.kind == Kind::kReduce;
      int& ended = (event.kind == Kind::kReshard ? resharded : reduced)[place.group];
      if (ends && ++ended < groups_[place.group].members) continue;  // the last member's ends the group
      if (ends) ended = 0;
      steps_.push_back({event.kind, place.group, event.in_backward, event.seconds});
    }
  }

  /// A unit's own compute, part by part.
  void add_parts(const Place& place, const Event& compute) {
    const size_t count = place.parts.size();
    for (size_t i = 0; i < count; ++i) {
      const size_t part = compute.in_backward ? count - 1 - i : i;
      steps_.push_back({Kind::kGather, place.parts[part], compute.in_backward, 0});
      steps_.push_back({Kind::kCompute, place.parts[part], compute.in_backward, compute.seconds * place.shares[part]});
      const Kind end = compute.in_backward ? Kind::kReduce : Kind::kReshard;
      steps_.push_back({end, place.parts[part], compute.in_backward, 0});
    }
  }

  void issue(size_t group, double from) {
    const auto [place, is_new] = ready_.emplace(group, 0);
    if (!is_new) return;
    const double begin = std::max(link_free_, from);
    link_free_ = begin + link_.gather_latency + groups_[group].gathered_bytes / link_.gather_bandwidth;
    place->second = link_free_;
    add_bytes(groups_[group].gathered_bytes);
  }

  void wait_until(double time) {
    forecast_.exposed += std::max(0.0, time - computed_);
    computed_ = std::max(computed_, time);
  }

  void gather(size_t index) {
    const Step& step = steps_[index];
    issue(step.group, computed_);
    wait_until(ready_.at(step.group));
    int ahead = step.in_backward ? backward_ahead_ : forward_ahead_;
    for (size_t next = index + 1; next < steps_.size() && ahead > 0; ++next) {
      const Step& later = steps_[next];
      if (later.kind != Kind::kGather || later.group == step.group) continue;
      if (later.in_backward != step.in_backward) break;
      issue(later.group, computed_);
      --ahead;
    }
  }

  void free(size_t group) {
    if (ready_.erase(group) > 0) add_bytes(-groups_[group].gathered_bytes);
  }

  void reduce(size_t group) {
    free(group);
    wait_until(reduced_at_);  // one reduction at a time
    add_bytes(-reducing_bytes_);
    reducing_bytes_ = groups_[group].reduced_bytes;
    add_bytes(reducing_bytes_);
    link_free_ = std::max(link_free_, computed_) + link_.reduce_latency + reducing_bytes_ / link_.reduce_bandwidth;
    reduced_at_ = link_free_;
  }

  void add_bytes(int64_t bytes) {
    bytes_ += bytes;
    forecast_.gathered_peak = std::max(forecast_.gathered_peak, bytes_);
  }

  LinkCosts link_;
  int forward_ahead_, backward_ahead_;
  std::vector<Group> groups_;
  std::vector<Place> places_;  // by traced unit
  std::vector<Step> steps_;
  std::map<size_t, double> ready_;  // groups that are gathered, or will be then
  double computed_ = 0, link_free_ = 0, reduced_at_ = 0;
  int64_t bytes_ = 0, reducing_bytes_ = 0;
  PlanForecast forecast_;
};

/// "model.layers" of "model.layers.7"; nothing for other modules than a list's.
std::optional<std::string> list_of(const UnitPlan::Unit& unit) {
  if (unit.size() != 1) return std::nullopt;
  const size_t dot = unit[0].rfind('.');
  const bool is_of_list = dot != std::string::npos && dot + 1 < unit[0].size() &&
                          std::all_of(unit[0].begin() + static_cast<std::ptrdiff_t>(dot) + 1, unit[0].end(),
                                      [](char letter) { return letter >= '0' && letter <= '9'; });
  return is_of_list ? std::optional(unit[0].substr(0, dot)) : std::nullopt;
}

UnitPlan merged(const UnitPlan& plan, size_t count) {
  UnitPlan result = plan;
  result.units.clear();
  std::optional<std::string> list;
  size_t members = 0;
  for (const auto& unit : plan.units) {
    const auto own = list_of(unit);
    const bool joins = own && own == list && members < count;
    if (joins) {
      result.units.back().push_back(unit[0]);
      ++members;
    } else {
      result.units.push_back(unit);
      members = 1;
    }
    list = own;
  }
  return result;
}

UnitPlan split(const StepTrace& trace, const UnitPlan& plan) {
  UnitPlan result = plan;
  result.units.clear();
  for (const auto& unit : plan.units) {
    result.units.push_back(unit);
    const auto traced = std::find_if(trace.units.begin(), trace.units.end(),
                                     [&](const UnitTrace::Unit& each) { return each.modules == unit; });
    if (traced == trace.units.end() || traced->parts.size() < 2) continue;
    const auto can_split = [](const UnitTrace::Part& part) { return part.forward_seconds > 0 && !part.runs_again; };
    if (!std::all_of(traced->parts.begin(), traced->parts.end(), can_split)) continue;
    for (const auto& part : traced->parts) result.units.push_back({part.path});
  }
  return result;
}

size_t longest_list(const UnitPlan& plan) {
  std::map<std::string, size_t> lengths;
  size_t longest = 0;
  for (const auto& unit : plan.units) {
    if (const auto list = list_of(unit)) longest = std::max(longest, ++lengths[*list]);
  }
  return longest;
}

}  // namespace

LinkCosts link_costs(const StepTrace& trace, double gather_latency, double reduce_latency) {
  LinkCosts link{.gather_latency = gather_latency, .reduce_latency = reduce_latency};
  double gathered = 0, gathering = 0, reduced = 0, reducing = 0;
  for (const auto& event : trace.events) {
    const auto& unit = trace.units.at(event.unit);
    if (event.kind == Kind::kGather) {
      gathered += static_cast<double>(unit.gathered_bytes);
      gathering += event.seconds - gather_latency;
    } else if (event.kind == Kind::kReduce) {
      reduced += static_cast<double>(unit.reduced_bytes);
      reducing += event.seconds - reduce_latency;
    }
  }
  constexpr double kFastest = 1e13;  // where a latency explains all
  link.gather_bandwidth = gathering > gathered / kFastest ? gathered / gathering : kFastest;
  link.reduce_bandwidth = reducing > reduced / kFastest ? reduced / reducing : kFastest;
  return link;
}

PlanForecast forecast_plan(const StepTrace& trace, const LinkCosts& link, const UnitPlan& plan, bool host_runs_ahead) {
  return Replay(trace, link, plan, host_runs_ahead).run();
}

UnitPlan search_plan(const StepTrace& trace, const LinkCosts& link, const UnitPlan& present, int64_t more_bytes,
                     bool host_runs_ahead) {
  struct Candidate {
    UnitPlan plan;
    PlanForecast forecast;
  };
  const auto look = [&](const UnitPlan& plan) {
    return Candidate{plan, forecast_plan(trace, link, plan, host_runs_ahead)};
  };
  std::vector<UnitPlan> groupings = {present, split(trace, present)};
  const size_t longest = longest_list(present);
  for (const size_t count : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
    if (count <= longest) groupings.push_back(merged(present, count));
  }
  const Candidate now = look(present);
  std::vector<Candidate> candidates;
  for (auto& plan : groupings) {
    for (const int forward : {0, 1, 2}) {
      for (const int backward : {0, 2}) {
        plan.forward_prefetch = forward;
        plan.backward_prefetch = backward;
        candidates.push_back(look(plan));
      }
    }
  }
  std::erase_if(candidates, [&](const Candidate& each) {
    return each.forecast.gathered_peak > now.forecast.gathered_peak + more_bytes;
  });
  const auto seconds = [](const Candidate& each) { return each.forecast.seconds; };
  const auto fastest = std::ranges::min_element(candidates, {}, seconds);
  if (fastest == candidates.end() || seconds(*fastest) > 0.99 * now.forecast.seconds) return present;
  const double limit = 1.01 * seconds(*fastest);
  std::erase_if(candidates, [&](const Candidate& each) { return seconds(each) > limit; });
  return std::ranges::min_element(candidates, {}, [](const Candidate& each) { return each.forecast.gathered_peak; })
      ->plan;
}

}  // namespace megashard
