#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

class Mistakes;
struct Arguments;
struct Option;

/// Ranks whose times are logged.
enum class TimingLogOption { kMax, kMinMax, kAll };

struct LoggingArguments {
  int64_t log_interval = 100;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
  bool log_throughput = false;
  bool log_tokens_per_second = false;
  bool log_memory = false;               // peak memory of a rank
  std::optional<int64_t> logging_level;  // as in Python; unset: also notices
  int64_t timing_log_level = 0;          // 0 to 2: detail of step times
  TimingLogOption timing_log_option = TimingLogOption::kMinMax;
  bool print_all_arguments = false;            // also those at their defaults
  bool log_progress = false;                   // no effect: metrics_file has more detail
  bool log_tps = false;                        // "tokens per sample" in the log line
  std::optional<std::string> metrics_file;     // JSON lines, one object per step
  std::optional<std::string> prometheus_file;  // metrics of the last step
  std::optional<std::string> tensorboard_dir;  // event files
  int64_t tensorboard_log_interval = 1;
  bool log_timers_to_tensorboard = false;  // step time and, with log_throughput, TFLOP/s
  bool log_validation_ppl_to_tensorboard = false;
  bool log_memory_to_tensorboard = false;
  bool log_world_size_to_tensorboard = false;
  bool log_loss_scale_to_tensorboard = true;
  std::optional<std::string> fsdp_schedule_trace;  // folder for rank_N.json
  bool log_host_syncs = false;                     // logs operations that block the host for the device
  bool profile = false;
  int64_t profile_step_start = 10, profile_step_end = 12;  // completed steps at its start and end
  std::vector<int64_t> profile_ranks{0};
  std::optional<std::string> profile_save_path;  // unset: tensorboard_dir
  std::optional<double> peak_tflops;             // of one device, for MFU; unset: known or measured value
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_logging_options(std::vector<Option>& rows);

void check_logging(const Arguments& arguments, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
