#include "launch/report/memory_drawing.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "launch/output/short_text.h"
#include "launch/report/html_text.h"
#include "launch/report/line_chart.h"
#include "launch/report/page_style.h"
#include "launch/report/trace_drawing.h"

namespace megashard {
namespace {

using Memory = ReportedTrace::Memory;

constexpr double kAreasHeight = 170, kAreasTop = 8, kLeastStep = 1;  // kLeastStep: minimum visible

double bytes_of(const Memory& memory) { return std::accumulate(memory.bytes.begin(), memory.bytes.end(), 0.0); }

/// Samples to draw: the maximum of each interval that is too short to be visible.
std::vector<Memory> seen_of(const ReportedTrace& trace) {
  std::vector<Memory> seen;
  double stretch_begin = 0;
  for (const auto& sample : trace.memory) {
    const double x = trace_x(trace, sample.at);
    if (seen.empty() || x >= stretch_begin + kLeastStep) {
      seen.push_back(sample);
      stretch_begin = x;
    } else if (bytes_of(sample) > bytes_of(seen.back())) {
      seen.back().bytes = sample.bytes;
    }
  }
  return seen;
}

std::string area_of(const ReportedTrace& trace, const std::vector<Memory>& seen, size_t number, double most) {
  const auto place_of = [&](double seconds, double bytes) {
    return place_text(trace_x(trace, std::clamp(seconds, 0.0, trace.seconds))) + "," +
           place_text(kAreasTop + kAreasHeight * (1 - bytes / most)) + " ";
  };
  std::string above, below;
  double largest = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto& bytes = seen[i].bytes;
    const double under = std::accumulate(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(number), 0.0);
    const double until = i + 1 < seen.size() ? seen[i + 1].at : trace.seconds;
    above += place_of(seen[i].at, under + bytes[number]) + place_of(until, under + bytes[number]);
    below = place_of(until, under) + place_of(seen[i].at, under) + below;
    largest = std::max(largest, bytes[number]);
  }
  if (largest <= 0) return "";
  return "<polygon class=\"area c" + std::to_string(number % kCurveColors) + "\" points=\"" + above + below +
         "\"><title>" + html_text(trace.memory_classes[number]) + ", at most " + byte_text(largest) +
         "</title></polygon>\n";
}

}  // namespace

double fullest_bytes(const ReportedTrace& trace) {
  double most = 0;
  for (const auto& sample : trace.memory) most = std::max(most, bytes_of(sample));
  return most;
}

std::string memory_drawing_of(const ReportedTrace& trace) {
  constexpr double kMiB = 1 << 20, kGiB = 1 << 30;
  const double most = fullest_bytes(trace);
  if (most <= 0) return "";
  const double height = kAreasTop + kAreasHeight + kTraceAxisHeight, unit = most >= 2 * kGiB ? kGiB : kMiB;
  std::string svg = "<svg class=\"trace\" role=\"img\" aria-label=\"memory by class\" viewBox=\"0 0 " +
                    place_text(kTraceWidth) + " " + place_text(height) + "\">\n" + time_axis(trace, height);
  for (const double tick : axis_ticks(0, most / unit)) {
    const auto y = kAreasTop + kAreasHeight * (1 - tick * unit / most);
    svg += "<line class=\"grid\" x1=\"" + place_text(kTraceLeft) + "\" x2=\"" + place_text(kTraceWidth) + "\" y1=\"" +
           place_text(y) + "\" y2=\"" + place_text(y) + "\"/><text class=\"y\" x=\"" + place_text(kTraceLeft - 6) +
           "\" y=\"" + place_text(y + 4) + "\">" + short_number(tick) + (unit == kGiB ? " GiB" : " MiB") + "</text>\n";
  }
  const auto seen = seen_of(trace);
  for (size_t i = 0; i < trace.memory_classes.size(); ++i) svg += area_of(trace, seen, i, most);
  return svg + "</svg>\n";
}

}  // namespace megashard
