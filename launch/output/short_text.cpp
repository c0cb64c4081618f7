#include "launch/output/short_text.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <utility>

namespace megashard {
namespace {

std::string with_format(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

}  // namespace

std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  constexpr std::pair<double, const char*> kUnits[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  const double size = std::abs(value);
  if (size < 1e4 || size >= 1e15) return with_format("%.4g", value);
  for (const auto& [unit, name] : kUnits) {
    if (size >= unit) return with_format("%.4g", value / unit) + name;
  }
  return "";
}

std::string percent_text(double share) { return std::isfinite(share) ? with_format("%.1f %%", 100 * share) : "-"; }

std::string byte_text(double bytes) {
  if (!std::isfinite(bytes)) return "-";
  if (bytes == 0) return "0 MiB";
  constexpr double kMib = 1 << 20, kGib = 1 << 30;
  if (std::abs(bytes) >= kGib) return with_format("%.2f GiB", bytes / kGib);
  return with_format(std::abs(bytes) < kMib ? "%.3f MiB" : "%.1f MiB", bytes / kMib);
}

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (seconds > 0 && seconds < 1e-5) return with_format("%.3g us", seconds * 1e6);
  if (seconds > 0 && seconds < 1e-3) return with_format("%.0f us", seconds * 1e6);
  if (seconds < 1) return with_format("%.1f ms", seconds * 1e3);
  if (seconds < 120) return with_format("%.1f s", seconds);
  const auto minutes = static_cast<int64_t>(std::lround(seconds / 60));
  if (minutes < 120) return std::to_string(minutes) + " min";
  return std::to_string(minutes / 60) + with_format(" h %02.0f min", static_cast<double>(minutes % 60));
}

}  // namespace megashard
