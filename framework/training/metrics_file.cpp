#include "framework/training/metrics_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "checkpoint/files/file_io.h"
#include "checkpoint/files/output_file.h"
#include "framework/diagnostics.h"
#include "framework/training/run_events.h"

namespace megashard {
namespace {

/// 0: it is no line of a step.
int64_t step_of(const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const bool has_step = object.is_object() && object.contains("step") && object["step"].is_number_integer();
  return has_step ? object["step"].get<int64_t>() : 0;
}

/// Replaces the file at once, and not at all when nothing is to go.
void cut(const std::string& path, int64_t step) {
  if (!std::filesystem::is_regular_file(path)) return;
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  const auto kept = lines_until(text.str(), step);
  // Through a link, which stays one.
  if (kept != text.str()) write_file_atomically(std::filesystem::canonical(path), kept);
}

}  // namespace

std::string lines_until(const std::string& text, int64_t step) {
  struct Line {
    int64_t step;
    std::string_view text;
  };
  std::vector<Line> kept;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    if (end == text.npos) break;  // a line that was cut short
    const Line line{step_of(text.substr(begin, end - begin)), std::string_view(text).substr(begin, end + 1 - begin)};
    if (line.step > 0) std::erase_if(kept, [&](const Line& each) { return each.step >= line.step; });
    if (line.step <= step) kept.push_back(line);
  }
  std::string lines;
  for (const auto& line : kept) lines += line.text;
  return lines;
}

std::string metrics_line(const StepReport& report) {
  nlohmann::ordered_json object;
  for_each_metric(report, [&](const Metric& metric, double value) {
    if (metric.key == nullptr) return;
    if (metric.is_whole) {
      object[metric.key] = static_cast<int64_t>(value);
    } else {
      object[metric.key] = value;
    }
  });
  return object.dump();
}

std::string keep_earlier_metrics(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0) return "";
  const auto real = std::filesystem::canonical(path).string();  // a link stays one
  std::string kept;
  for (int number = 1; kept.empty() || path_exists(kept); ++number) kept = real + "." + std::to_string(number);
  std::filesystem::rename(real, kept, error);
  if (error) {
    throw UsageError("--metrics-file " + path + " holds the steps of another run, and cannot be kept as " + kept +
                     ": " + error.message() + "; give another file");
  }
  if (path_exists(events_path(path))) std::filesystem::rename(events_path(path), events_path(kept), error);
  return kept;
}

MetricsFile::MetricsFile(const std::string& path, int64_t loaded_step) : path_(path) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  if (loaded_step > 0) cut(path, loaded_step);
  if (!file_.open(path, /*anew=*/loaded_step == 0))
    throw UsageError("--metrics-file " + path + " cannot be written; check the folder and its permissions.");
}

void MetricsFile::write(const StepReport& report) {
  if (!file_.append(metrics_line(report) + "\n"))
    throw std::runtime_error("metrics file " + path_ + " could not be written: " + std::strerror(errno));
}

}  // namespace megashard
