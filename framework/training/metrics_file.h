#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace megashard {

/// One step as --metrics-file records it. Unset values are left out.
struct StepMetrics {
  int64_t step = 0;                   ///< from 1
  double loss = 0.0;                  ///< mean over all tokens of the global batch, all ranks
  std::optional<double> grad_norm{};  ///< before clipping
  double lr = 0.0;                    ///< used in this step
  double tokens_per_s = 0.0;          ///< of all ranks
  std::optional<double> mfu{};        ///< share of the peak, 0 .. 1
  int64_t peak_memory_bytes = 0;      ///< of the largest rank; resident on a CPU, the allocator's on CUDA
  double data_wait_s = 0.0;
  double step_s = 0.0;
  int64_t consumed_samples = 0;  ///< after the step
  int64_t global_batch_size = 0;
  std::optional<double> zeros_in_grad{};    ///< --log-num-zeros-in-grad, of steps with a log line
  std::optional<double> params_norm{};      ///< --log-params-norm, of steps with a log line
  std::optional<double> validation_loss{};  ///< of an evaluation after this step
};

/// A JSON object on one line; doubles in the shortest form that reads back equal, null for what is
/// not finite.
std::string metrics_line(const StepMetrics& metrics);

/// The lines of a metrics file up to that step, of each step the last, as a run that goes on after
/// it leaves them. Lines that are no step's stay, but for one that was cut short at the end.
std::string lines_until(const std::string& text, int64_t step);

/// Writes one line a step, flushed, so that a reader can follow it. For rank 0.
class MetricsFile {
 public:
  /// A new file, or where a run goes on after `loaded_step`, the lines up to that one. Creates
  /// missing folders. Throws UsageError when the file cannot be written.
  MetricsFile(const std::string& path, int64_t loaded_step);

  /// Throws std::runtime_error when the line could not be written (a full disk).
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace megashard
