#include "framework/training/metrics_file.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

#include "framework/diagnostics.h"

namespace megashard {

std::string metrics_line(const StepMetrics& metrics) {
  nlohmann::ordered_json object;
  const auto add_if_set = [&object](const char* key, const std::optional<double>& value) {
    if (value) object[key] = *value;
  };
  object["step"] = metrics.step;
  object["loss"] = metrics.loss;
  add_if_set("grad_norm", metrics.grad_norm);
  object["lr"] = metrics.lr;
  object["tokens_per_s"] = metrics.tokens_per_s;
  add_if_set("mfu", metrics.mfu);
  object["peak_memory_bytes"] = metrics.peak_memory_bytes;
  object["data_wait_s"] = metrics.data_wait_s;
  object["step_s"] = metrics.step_s;
  object["consumed_samples"] = metrics.consumed_samples;
  object["global_batch_size"] = metrics.global_batch_size;
  add_if_set("zeros_in_grad", metrics.zeros_in_grad);
  add_if_set("params_norm", metrics.params_norm);
  add_if_set("validation_loss", metrics.validation_loss);
  return object.dump();
}

MetricsFile::MetricsFile(const std::string& path, Mode mode) : path_(path) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  file_.open(path, mode == Mode::kAppend ? std::ios::app : std::ios::trunc);
  if (!file_)
    throw UsageError("--metrics-file " + path +
                     " cannot be written; check the folder and its permissions.");
}

void MetricsFile::write(const StepMetrics& metrics) {
  file_ << metrics_line(metrics) << '\n' << std::flush;
  if (!file_)
    throw std::runtime_error("metrics file " + path_ + " could not be written; is the disk full?");
}

}  // namespace megashard
