#include "parallel/sim/access_log.h"

#include <iterator>
#include <utility>

namespace megashard::sim {
namespace {

bool ordered(const Access& earlier, const VectorClock& seen) {
  return earlier.agent < 0 || earlier.time <= seen.at(static_cast<size_t>(earlier.agent));
}

bool same(const Access& a, const Access& b) {
  return a.agent == b.agent && a.time == b.time && a.of_earlier_owner == b.of_earlier_owner;
}

}  // namespace

AccessLog::Span AccessLog::span_until(uintptr_t end) {
  Span span;
  span.end = end;
  return span;
}

void AccessLog::cut(uintptr_t at) {
  auto after = spans_.upper_bound(at);
  if (after == spans_.begin()) return;
  auto found = std::prev(after);
  if (found->first == at || found->second.end <= at) return;
  Span second = found->second;
  found->second.end = at;
  spans_.emplace_hint(after, at, std::move(second));
}

template <class Visit>
void AccessLog::over(uintptr_t begin, size_t bytes, const Visit& visit) {
  const uintptr_t end = begin + bytes;
  cut(begin);
  cut(end);
  auto at = spans_.lower_bound(begin);
  for (uintptr_t position = begin; position < end;) {
    if (at == spans_.end() || at->first > position) {
      const uintptr_t next = at == spans_.end() ? end : std::min(end, at->first);
      at = spans_.emplace_hint(at, position, span_until(next));
    }
    visit(at->second);
    position = at->second.end;
    ++at;
  }
}

void AccessLog::read(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen,
                     const Report& report) {
  over(begin, bytes, [&](Span& span) {
    if (!ordered(span.write, seen)) report(span.write, true);
    for (Access& earlier : span.reads) {
      if (earlier.agent != access.agent) continue;
      earlier = access;
      return;
    }
    span.reads.push_back(access);
  });
}

void AccessLog::write(uintptr_t begin, size_t bytes, const Access& access, const VectorClock& seen,
                      const Report& report) {
  if (bytes == 0) return;
  over(begin, bytes, [&](const Span& span) {
    if (!same(span.write, access) && !ordered(span.write, seen)) report(span.write, true);
    for (const Access& earlier : span.reads) {
      if (!same(earlier, access) && !ordered(earlier, seen)) report(earlier, false);
    }
  });
  // Replaces the spans of earlier, smaller accesses by one.
  const auto first = spans_.lower_bound(begin), last = spans_.lower_bound(begin + bytes);
  spans_.erase(first, last);
  Span written = span_until(begin + bytes);
  written.write = access;
  spans_.emplace(begin, std::move(written));
}

void AccessLog::hand_out(uintptr_t begin, size_t bytes, uint64_t window) {
  if (bytes == 0) return;
  over(begin, bytes, [&](Span& span) {
    span.write.of_earlier_owner = true;
    for (Access& earlier : span.reads) earlier.of_earlier_owner = true;
    span.undefined_in = window;
  });
}

void AccessLog::forget(uintptr_t begin, size_t bytes) {
  cut(begin);
  cut(begin + bytes);
  spans_.erase(spans_.lower_bound(begin), spans_.lower_bound(begin + bytes));
}

void AccessLog::settled(uintptr_t begin, size_t bytes, uint64_t window,
                        const std::function<void(uintptr_t, size_t, const Access&)>& each) const {
  const uintptr_t end = begin + bytes;
  static const Access nobody;
  uintptr_t position = begin;
  auto at = spans_.upper_bound(begin);
  if (at != spans_.begin() && std::prev(at)->second.end > begin) --at;
  for (; at != spans_.end() && at->first < end; ++at) {
    if (at->first > position) each(position, at->first - position, nobody);
    const uintptr_t from = std::max(position, at->first), to = std::min(end, at->second.end);
    if (at->second.undefined_in != window) each(from, to - from, at->second.write);
    position = to;
  }
  if (position < end) each(position, end - position, nobody);
}

}  // namespace megashard::sim
