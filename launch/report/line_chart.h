#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace megashard {

/// Values over steps. What is no number leaves a gap.
struct Curve {
  std::string name{};
  size_t color = 0;  ///< of the page's, by number
  std::vector<double> steps{};
  std::vector<double> values{};  ///< as many
  bool has_gaps = false;         ///< few steps have a value: points, joined over the gaps
};

struct LineChart {
  std::string title{};
  std::string (*value_text)(double value) = nullptr;  ///< for the axis
  double exact_unit = 1;                              ///< where that writes two ticks alike, they are divided by this,
  const char* exact_name = "";                        ///< and written in full before its name
  std::vector<Curve> curves{};
  std::vector<double> restarts{};  ///< the steps at which runs went on
};

/// An <svg> of the page's colours and classes; the page's script shows the values under the pointer. Of long runs each
/// of some hundred parts is drawn by its first, least, largest and last value. Empty: there is no value.
std::string svg_of(const LineChart& chart);

/// Round numbers from about `least` to `most`: their step is 1, 2 or 5 times a power of ten.
std::vector<double> axis_ticks(double least, double most);

}  // namespace megashard
