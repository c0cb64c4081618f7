#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

struct Option;

/// Which of the ranks' times the log shows.
enum class TimingLogOption { kMax, kMinMax, kAll };

struct LoggingArguments {
  int64_t log_interval = 100;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
  bool log_throughput = false;
  bool log_tokens_per_second = false;
  bool log_memory = false;       // peak of a rank
  int64_t timing_log_level = 0;  // 0 to 2: how finely a step's time is told
  TimingLogOption timing_log_option = TimingLogOption::kMinMax;
  bool print_all_arguments = false;         // also those at their defaults
  bool log_progress = false;                // no effect: metrics_file says more
  bool log_tps = false;                     // "tokens per sample" in the log line
  std::optional<std::string> metrics_file;  // JSON lines, one object a step
  std::optional<double> peak_tflops;        // of one device, for mfu; unset: the device's, or measured
};

namespace detail {

/// The rows of these options, in the order of the help.
void add_logging_options(std::vector<Option>& rows);

}  // namespace detail

}  // namespace megashard
