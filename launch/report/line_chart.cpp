#include "launch/report/line_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "launch/report/page_style.h"

namespace megashard {
namespace {

constexpr double kWidth = 440, kHeight = 220, kLeft = 58, kRight = 10, kTop = 10, kBottom = 24;
constexpr size_t kParts = 300;  // for longer curves

struct Range {
  double least = std::numeric_limits<double>::infinity(), most = -std::numeric_limits<double>::infinity();
  void take(double value) { least = std::min(least, value), most = std::max(most, value); }
  bool is_empty() const { return least > most; }
  double share(double value) const { return most > least ? (value - least) / (most - least) : 0.5; }
};

double place_x(const Range& steps, double step) { return kLeft + steps.share(step) * (kWidth - kLeft - kRight); }
double place_y(const Range& values, double value) {
  return kHeight - kBottom - values.share(value) * (kHeight - kTop - kBottom);
}

/// Indices of values in [begin, end) that show the shape: first, least, largest, last.
std::set<size_t> outline_of(const std::vector<double>& values, size_t begin, size_t end) {
  std::set<size_t> kept;
  size_t least = end, most = end, last = end;
  for (size_t i = begin; i < end; ++i) {
    if (!std::isfinite(values[i])) continue;
    if (last == end) kept.insert(i);
    if (least == end || values[i] < values[least]) least = i;
    if (most == end || values[i] > values[most]) most = i;
    last = i;
  }
  if (last != end) kept.insert({least, most, last});
  return kept;
}

std::vector<size_t> drawn(const Curve& curve) {
  std::vector<size_t> all;
  const size_t count = curve.values.size();
  if (count <= 4 * kParts || curve.has_gaps) {
    for (size_t i = 0; i < count; ++i) all.push_back(i);
    return all;
  }
  for (size_t part = 0; part < kParts; ++part) {
    const size_t begin = part * count / kParts, end = (part + 1) * count / kParts;
    const auto kept = outline_of(curve.values, begin, end);
    if (kept.empty()) all.push_back(begin);  // a gap
    all.insert(all.end(), kept.begin(), kept.end());
  }
  return all;
}

std::string line_at(double x1, double y1, double x2, double y2, const std::string& kind) {
  return "<line class=\"" + kind + "\" x1=\"" + place_text(x1) + "\" y1=\"" + place_text(y1) + "\" x2=\"" +
         place_text(x2) + "\" y2=\"" + place_text(y2) + "\"/>";
}

std::string text_at(double x, double y, const std::string& kind, const std::string& text) {
  return "<text class=\"" + kind + "\" x=\"" + place_text(x) + "\" y=\"" + place_text(y) + "\">" + html_text(text) +
         "</text>";
}

std::string svg_of(const Curve& curve, const Range& steps, const Range& values) {
  const std::string color = "c" + std::to_string(curve.color);
  const std::string head =
      "<polyline class=\"curve " + color + "\" data-name=\"" + html_text(curve.name) + "\" points=\"";
  std::string svg, points, dots;
  size_t length = 0;
  double x = 0, y = 0;
  const auto finish = [&] {
    if (length > 1) svg += head + points + "\"/>";
    if (length == 1 || curve.has_gaps) svg += dots;
    points.clear(), dots.clear(), length = 0;
  };
  for (const size_t i : drawn(curve)) {
    if (!std::isfinite(curve.values[i])) {
      if (!curve.has_gaps) finish();
      continue;
    }
    x = place_x(steps, curve.steps[i]), y = place_y(values, curve.values[i]);
    points += (length == 0 ? "" : " ") + place_text(x) + "," + place_text(y);
    dots += "<circle class=\"" + color + "\" cx=\"" + place_text(x) + "\" cy=\"" + place_text(y) + "\" r=\"2.5\"/>";
    ++length;
  }
  finish();
  return svg;
}

std::string written_as(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

/// Distinct labels of the value axis.
std::vector<std::string> tick_texts(const LineChart& chart, const std::vector<double>& ticks) {
  std::vector<std::string> texts;
  for (const double tick : ticks) texts.push_back(tick == 0 ? "0" : chart.value_text(tick));
  if (std::set<std::string>(texts.begin(), texts.end()).size() == texts.size()) return texts;
  for (size_t i = 0; i < ticks.size(); ++i)
    texts[i] = written_as("%.7g", ticks[i] / chart.exact_unit) + chart.exact_name;
  return texts;
}

/// Labels of the step axis, all with the same unit.
std::string step_text(double step, double most) {
  if (step == 0 || most < 1e4) return written_as("%.0f", step);
  return most < 1e7 ? written_as("%.5gk", step / 1e3) : written_as("%.5gM", step / 1e6);
}

}  // namespace

std::vector<double> axis_ticks(double least, double most) {
  constexpr double kCount = 4;
  if (!(most > least)) return {least};
  const double rough = (most - least) / kCount, power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= rough * 0.75) step = factor * power;
  }
  std::vector<double> ticks;
  for (double number = std::ceil(least / step - 1e-9); number * step <= most + step * 1e-9; ++number)
    ticks.push_back(number == 0 ? 0 : number * step);  // no -0
  return ticks;
}

std::string svg_of(const LineChart& chart) {
  Range steps, values;
  for (const auto& curve : chart.curves) {
    for (size_t i = 0; i < curve.values.size(); ++i) {
      if (!std::isfinite(curve.values[i])) continue;
      steps.take(curve.steps[i]);
      values.take(curve.values[i]);
    }
  }
  if (values.is_empty()) return "";
  std::string svg = "<svg class=\"chart\" role=\"img\" aria-label=\"" + html_text(chart.title) + "\" viewBox=\"0 0 " +
                    place_text(kWidth) + " " + place_text(kHeight) + "\" data-plot=\"" + place_text(kLeft) + " " +
                    place_text(kWidth - kRight) + " " + place_text(kTop) + " " + place_text(kHeight - kBottom) + "\"";
  char range[160];
  std::snprintf(range, sizeof range, " data-range=\"%.9g %.9g %.9g %.9g\">", steps.least, steps.most, values.least,
                values.most);
  svg += range;
  const auto ticks = axis_ticks(values.least, values.most);
  const auto texts = tick_texts(chart, ticks);
  for (size_t i = 0; i < ticks.size(); ++i) {
    const double y = place_y(values, ticks[i]);
    svg += line_at(kLeft, y, kWidth - kRight, y, "grid");
    svg += text_at(kLeft - 6, y + 4, "y", texts[i]);
  }
  svg += text_at(kLeft - 6, kHeight - 7, "y", "step");
  for (const double tick : axis_ticks(steps.least, steps.most)) {
    if (tick != std::floor(tick)) continue;  // not a whole step
    svg += text_at(place_x(steps, tick), kHeight - 7, "x", step_text(tick, steps.most));
  }
  for (const double restart : chart.restarts) {
    if (restart < steps.least || restart > steps.most) continue;
    svg += line_at(place_x(steps, restart), kTop, place_x(steps, restart), kHeight - kBottom, "restart");
  }
  for (const auto& curve : chart.curves) svg += svg_of(curve, steps, values);
  return svg + "</svg>\n";
}

}  // namespace megashard
