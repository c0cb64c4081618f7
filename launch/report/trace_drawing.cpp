#include "launch/report/trace_drawing.h"

#include "launch/output/short_text.h"
#include "launch/report/html_text.h"
#include "launch/report/line_chart.h"

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

}  // namespace megashard
