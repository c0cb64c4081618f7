#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

struct LoggingArguments;

/// What the host of one rank measures of a step.
struct HostMeasures {
  double data_wait_seconds = 0;
  double peak_memory_bytes = 0;
};

/// A step, over all ranks.
struct StepSummary {
  double loss = 0;                     ///< mean over the objective's terms in the global batch
  double terms = 0;                    ///< their number: of tokens whose loss_mask is not 0, or of pairs
  bool has_loss = true;                ///< false: there are no terms
  double grad_norm = 0;                ///< before clipping; no number where the step was skipped
  bool skipped = false;                ///< by the loss scaling: the gradients had overflowed
  std::optional<double> loss_scale{};  ///< after the step; unset: losses are not scaled
  double saved_flops = 0;              ///< by documents, of StepReport::flops
  std::vector<double> further{};       ///< the metrics after the loss, by StepReport::metric_names
  std::vector<double> measures{};      ///< of the metrics that ranks measure
};

/// The steps since the last log line.
struct StepInterval {
  double loss_sum = 0;                 ///< of the steps that were not skipped and whose loss is finite
  int64_t losses = 0;                  ///< number of these steps
  std::vector<double> further_sums{};  ///< of these steps
  double tokens_per_sample = 0;        ///< summed over the steps
  double saved_flops = 0;              ///< summed over the steps
  int64_t steps = 0;
  int64_t samples = 0;
  int64_t skipped_steps = 0;
  int64_t nan_steps = 0;       ///< whose loss is no number
  int64_t unlearnt_steps = 0;  ///< in which no token was learnt
  double seconds = 0;
};

/// All that metrics are worked out from, after a step.
struct StepReport {
  int64_t iteration = 0;  ///< from 1
  int64_t train_iters = 0;
  int64_t consumed_samples = 0;  ///< after the step
  int64_t global_batch_size = 0;
  int64_t seq_length = 0;
  int64_t world_size = 1;
  double seconds = 0;
  double lr = 0;       ///< used in this step
  double next_lr = 0;  ///< after the scheduler's step
  double flops = 0;    ///< FLOPs of the global batch if each sample were one document
  std::optional<double> peak_tflops{};
  std::vector<std::string> metric_names{"lm loss"};  ///< TrainStep's; the first one is the loss
  StepSummary step{};
  StepInterval interval{};                  ///< this step included
  std::optional<double> zeros_in_grad{};    ///< --log-num-zeros-in-grad, of steps with a log line
  std::optional<double> params_norm{};      ///< --log-params-norm, of steps with a log line
  std::optional<double> validation_loss{};  ///< of an evaluation after this step
  int64_t failed_saves = 0;                 ///< in a row, up to this step
  bool has_line = false;                    ///< a log line is due
};

enum class OverRanks { kMax, kSum };

/// A number that is logged for a step. The log line and the writers of metrics_writer.h print those that have their
/// name.
struct Metric {
  const char* key = nullptr;               ///< in the metrics file; null: not there
  const char* text = nullptr;              ///< in the log line, as printf's format of a double; null: not there
  bool is_whole = false;                   ///< an integer in the file
  const char* tag = nullptr;               ///< in TensorBoard, Megatron's; null: not there
  bool by_samples = false;                 ///< there also "TAG vs samples"
  bool of_evaluation = false;              ///< there whenever there is one
  bool is_loss = false;                    ///< text and tag begin with the loss's name
  bool is_further = false;                 ///< stands for all metrics after the loss
  bool LoggingArguments::*flag = nullptr;  ///< shown only if it is set, and further_flag; null: always
  bool LoggingArguments::*further_flag = nullptr;
  /// None: the step has no such number, and nothing is written. Null: what the ranks have measured.
  std::optional<double> (*value)(const StepReport& report) = nullptr;
  /// Measured by every rank when its gradients are there, and reduced over the ranks. Null: not measured.
  double (*of_rank)(const HostMeasures& host) = nullptr;
  OverRanks over_ranks = OverRanks::kMax;
};

/// Calls `visit` for each metric that the step has, in order. `log`: flags that some
/// depend on; null: those are left out. A new metric is one entry of the list in metrics.cpp.
void for_each_metric(const StepReport& report, const std::function<void(const Metric& metric, double value)>& visit,
                     const LoggingArguments* log = nullptr);

/// What this rank measures, for the metrics that ranks measure, in their order.
std::vector<double> measured_metrics(const HostMeasures& host);
/// Takes another rank's into those of the ranks before it (none: empty).
void reduce_metrics(std::vector<double>& all, const std::vector<double>& of_rank);

}  // namespace megashard
