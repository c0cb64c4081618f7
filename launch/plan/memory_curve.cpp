#include "launch/plan/memory_curve.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace megashard {
namespace {

void add_totals(PlanTotals& all, PlanTotals part) {
  all.seconds += part.seconds;
  all.host_seconds += part.host_seconds;
  all.exposed_seconds += part.exposed_seconds;
  for (auto& each : part.collectives) {
    const auto known = std::ranges::find(all.collectives, each.kind, &CollectiveTotal::kind);
    if (known == all.collectives.end()) {
      all.collectives.push_back(std::move(each));
      continue;
    }
    known->count += each.count;
    known->bytes += each.bytes;
    known->seconds += each.seconds;
  }
  std::ranges::move(part.spans, std::back_inserter(all.spans));
}

}  // namespace

MemoryCurve::MemoryCurve(const DevicePlan& plan, std::function<PeakMemory()> in_use)
    : plan_(plan), in_use_(std::move(in_use)), watch_([this] { look(); }) {}

PlanTotals MemoryCurve::take_totals(std::vector<MemorySample>& samples) {
  take_new_totals();
  samples = std::exchange(samples_, {});
  return std::exchange(totals_, {});
}

void MemoryCurve::take_new_totals() {
  constexpr int kComputes = 0;
  auto part = plan_.take_totals();
  for (const auto& span : part.spans) {
    if (span.stream == kComputes) now_ = std::max(now_, span.begin + span.seconds);
  }
  add_totals(totals_, std::move(part));
}

void MemoryCurve::look() {
  take_new_totals();
  const PeakMemory memory = in_use_();
  if (samples_.empty() || memory.parts() != samples_.back().memory.parts()) samples_.push_back({now_, memory});
}

}  // namespace megashard
