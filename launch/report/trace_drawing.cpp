#include "launch/report/trace_drawing.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "launch/output/short_text.h"
#include "launch/report/line_chart.h"
#include "launch/report/page_style.h"

namespace megashard {
namespace {

constexpr double kRowHeight = 26, kBarHeight = 20;
constexpr double kLeastGap = 0.7;  // minimum visible

/// Spans drawn as one rectangle.
struct Block {
  double begin = 0, end = 0;          // coordinates
  double longest = 0;                 // seconds
  const std::string* name = nullptr;  // of the longest span
  size_t count = 0;
};

std::string block_of(const Block& block, double y, bool communicates) {
  const auto tip = *block.name + ", " + duration_text(block.longest) +
                   (block.count > 1 ? ", the longest of " + std::to_string(block.count) : "");
  return "<rect class=\"" + std::string(communicates ? "communicates" : "computes") + "\" x=\"" +
         place_text(block.begin) + "\" y=\"" + place_text(y) + "\" width=\"" +
         place_text(std::max(0.3, block.end - block.begin)) + "\" height=\"" + place_text(kBarHeight) + "\"><title>" +
         html_text(tip) + "</title></rect>";
}

/// Communication is drawn over computation, because spans that contain it do neither themselves.
std::string blocks_of(const ReportedTrace& trace, const ReportedTrace::Row& row, double y, bool communicates) {
  std::string svg;
  Block open;
  const auto finish = [&] {
    if (open.count > 0) svg += block_of(open, y, communicates);
    open = {};
  };
  for (const auto& span : row.spans) {
    if (span.communicates != communicates) continue;
    const double begin = trace_x(trace, span.begin), end = trace_x(trace, span.end);
    if (open.count > 0 && begin > open.end + kLeastGap) finish();
    if (open.count == 0) open.begin = begin, open.end = end;
    open.end = std::max(open.end, end);
    ++open.count;
    if (const double seconds = span.end - span.begin; open.name == nullptr || seconds > open.longest)
      open.longest = seconds, open.name = &span.name;
  }
  finish();
  return svg;
}

}  // namespace

double trace_x(const ReportedTrace& trace, double seconds) {
  const double share = trace.seconds > 0 ? seconds / trace.seconds : 0;
  return kTraceLeft + share * (kTraceWidth - kTraceLeft);
}

std::string time_axis(const ReportedTrace& trace, double height) {
  std::string svg;
  for (const double tick : axis_ticks(0, trace.seconds)) {
    const auto x = place_text(trace_x(trace, tick));
    svg += "<line class=\"grid\" x1=\"" + x + "\" y1=\"0\" x2=\"" + x + "\" y2=\"" +
           place_text(height - kTraceAxisHeight) + "\"/><text class=\"x\" x=\"" + x + "\" y=\"" +
           place_text(height - 6) + "\">" + duration_text(tick) + "</text>";
  }
  return svg;
}

std::string drawing_of(const ReportedTrace& trace) {
  const double height = kRowHeight * static_cast<double>(trace.rows.size()) + kTraceAxisHeight;
  std::string svg = "<svg class=\"trace\" role=\"img\" aria-label=\"timeline\" viewBox=\"0 0 " +
                    place_text(kTraceWidth) + " " + place_text(height) + "\">\n";
  double y = 2;
  for (const auto& row : trace.rows) {
    svg += "<text class=\"row\" x=\"0\" y=\"" + place_text(y + 14) + "\">" + html_text(row.name) + "</text>";
    svg += blocks_of(trace, row, y, /*communicates=*/false) + blocks_of(trace, row, y, /*communicates=*/true) + "\n";
    y += kRowHeight;
  }
  return svg + time_axis(trace, height) + "</svg>\n";
}

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
