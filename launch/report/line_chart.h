#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace megashard {

/// Values per step. NaN and infinity leave a gap.
struct Curve {
  std::string name{};
  size_t color = 0;  ///< index of a page colour
  std::vector<double> steps{};
  std::vector<double> values{};  ///< one per step
  bool has_gaps = false;         ///< few steps have a value: drawn as points, joined over gaps
};

struct LineChart {
  std::string title{};
  std::string (*value_text)(double value) = nullptr;  ///< formats values of the axis
  double exact_unit = 1;                              ///< if that formats two ticks alike, they are divided by this
  const char* exact_name = "";                        ///< and written in full before this unit
  std::vector<Curve> curves{};
  std::vector<double> restarts{};  ///< steps at which runs resumed
};

/// An <svg> with the page's colours and classes; the page's script shows the values under the pointer. Long runs are
/// drawn in a few hundred parts, each by its first, least, largest and last value. Empty if there are no values.
std::string svg_of(const LineChart& chart);

/// Round numbers from about `least` to `most` with a step of 1, 2 or 5 times a power of ten.
std::vector<double> axis_ticks(double least, double most);

}  // namespace megashard
