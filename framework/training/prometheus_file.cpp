#include "framework/training/prometheus_file.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace megashard {
namespace {

/// The shortest text that reads back equal; what is not finite in Prometheus' words.
std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace

std::string prometheus_text(const StepReport& report) {
  std::string text;
  for_each_metric(report, [&](const Metric& metric, double value) {
    if (metric.key == nullptr) return;
    std::string name = std::string("megashard_") + metric.key;
    std::ranges::replace_if(
        name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
    text += "# TYPE " + name + " gauge\n" + name + " " + number_text(value) + "\n";
  });
  return text;
}

void PrometheusFile::write(const StepReport& report) {
  const auto written = path_ + ".next";
  std::ofstream file(written);
  file << prometheus_text(report) << std::flush;
  std::error_code error;
  if (file) std::filesystem::rename(written, path_, error);
  if (!file || error) throw std::runtime_error("Prometheus file " + path_ + " could not be written; is the disk full?");
}

}  // namespace megashard
