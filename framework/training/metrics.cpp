#include "framework/training/metrics.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "framework/arguments/logging_arguments.h"
#include "framework/training/flops.h"

namespace megashard {
namespace {

using Report = const StepReport&;
using Result = std::optional<double>;
using Flags = LoggingArguments;

Result shown_if(bool asked_for, double value) { return asked_for ? Result(value) : Result(); }
double number(int64_t count) { return static_cast<double>(count); }
double step_tflops(Report r) { return tflops_per_device(r.flops - r.step.saved_flops, r.seconds, r.world_size); }

double mean_loss(const StepInterval& interval) {
  if (interval.losses > 0) return interval.loss_sum / number(interval.losses);
  return interval.steps > interval.skipped_steps + interval.unlearnt_steps ? std::nan("") : 0;
}

/// Losses of 0 or less are left out, as in Megatron; NaN is shown.
Result shown_loss(double loss) { return shown_if(!(loss <= 0), loss); }

Result measured(Report report, std::string_view key);

/// Scripts cut Megatron's log line at ':' and '|', so its fields keep their order and form, and further ones stand
/// behind them. The log line begins with its time and "iteration N/N", which is no metric.
constexpr Metric kMetrics[] = {
    {.key = "step", .is_whole = true, .value = [](Report r) -> Result { return number(r.iteration); }},
    {.key = "loss",
     .tag = "",
     .by_samples = true,
     .is_loss = true,
     .value = [](Report r) -> Result { return shown_if(r.step.has_loss, r.step.loss); }},
    {.key = "grad_norm",
     .tag = "grad-norm",
     .by_samples = true,
     .value = [](Report r) -> Result { return r.step.grad_norm; }},
    {.key = "lr", .tag = "learning-rate", .by_samples = true, .value = [](Report r) -> Result { return r.lr; }},
    {.key = "tokens_per_s",
     .value = [](Report r) -> Result { return number(r.global_batch_size * r.seq_length) / r.seconds; }},
    {.key = "mfu",
     .value = [](Report r) -> Result {
       if (!r.peak_tflops) return {};
       return step_tflops(r) / *r.peak_tflops;
     }},
    {.key = "peak_memory_bytes",  // resident on a CPU, the allocator's on a GPU
     .is_whole = true,
     .of_rank = [](const HostMeasures& host) { return host.peak_memory_bytes; },
     .over_ranks = OverRanks::kMax},
    {.key = "data_wait_s",
     .of_rank = [](const HostMeasures& host) { return host.data_wait_seconds; },
     .over_ranks = OverRanks::kMax},
    {.key = "step_s", .value = [](Report r) -> Result { return r.seconds; }},
    {.key = "consumed_samples",
     .text = " consumed samples: %12.0f |",
     .is_whole = true,
     .value = [](Report r) -> Result { return number(r.consumed_samples); }},
    {.text = " elapsed time per iteration (ms): %.1f |",
     .value = [](Report r) -> Result { return r.interval.seconds * 1000 / number(r.interval.steps); }},
    {.text = " throughput per GPU (TFLOP/s/GPU): %.1f |",
     .flag = &Flags::log_throughput,
     .value = [](Report r) -> Result {
       const double flops = r.flops * number(r.interval.steps) - r.interval.saved_flops;
       return tflops_per_device(flops, r.interval.seconds, r.world_size);
     }},
    {.text = " learning rate: %.6E |", .value = [](Report r) -> Result { return r.next_lr; }},
    {.key = "global_batch_size",
     .text = " global batch size: %5.0f |",
     .is_whole = true,
     .tag = "batch-size",
     .by_samples = true,
     .value = [](Report r) -> Result { return number(r.global_batch_size); }},
    {.text = ": %.6E |",
     .is_loss = true,
     .value = [](Report r) -> Result { return shown_loss(mean_loss(r.interval)); }},
    {.is_further = true},
    {.text = " tokens per sample: %.6E |",
     .flag = &Flags::log_tps,
     .value = [](Report r) -> Result { return r.interval.tokens_per_sample / number(r.interval.steps); }},
    {.text = " loss scale: %.1f |", .value = [](Report r) -> Result { return r.step.loss_scale.value_or(1); }},
    {.key = "loss_scale", .value = [](Report r) -> Result { return r.step.loss_scale; }},
    {.text = " grad norm: %.3f |",
     .value = [](Report r) -> Result { return shown_if(!r.step.skipped, r.step.grad_norm); }},
    {.key = "zeros_in_grad",
     .text = " num zeros: %.1f |",
     .tag = "num-zeros",
     .by_samples = true,
     .value = [](Report r) -> Result { return r.zeros_in_grad; }},
    {.key = "params_norm",
     .text = " params norm: %.3f |",
     .tag = "params-norm",
     .by_samples = true,
     .value = [](Report r) -> Result { return r.params_norm; }},
    {.text = " number of skipped iterations: %3.0f |",
     .value = [](Report r) -> Result { return number(r.interval.skipped_steps); }},
    {.key = "skipped",
     .is_whole = true,
     .value = [](Report r) -> Result { return shown_if(r.step.loss_scale.has_value(), r.step.skipped ? 1 : 0); }},
    {.text = " number of nan iterations: %3.0f |",
     .value = [](Report r) -> Result { return number(r.interval.nan_steps); }},
    {.text = " tokens per second: %.1f |",
     .flag = &Flags::log_tokens_per_second,
     .value = [](Report r) -> Result { return number(r.interval.samples * r.seq_length) / r.interval.seconds; }},
    {.text = " peak memory (MiB): %.1f |",
     .flag = &Flags::log_memory,
     .value = [](Report r) -> Result {
       const Result bytes = measured(r, "peak_memory_bytes");
       return shown_if(bytes.has_value(), bytes.value_or(0) / (1 << 20));
     }},
    {.key = "failed_saves",
     .is_whole = true,
     .tag = "failed-saves",
     .value = [](Report r) -> Result { return shown_if(r.failed_saves > 0, number(r.failed_saves)); }},
    {.key = "validation_loss",
     .tag = " validation",
     .by_samples = true,
     .of_evaluation = true,
     .is_loss = true,
     .value = [](Report r) -> Result { return r.validation_loss; }},
    {.tag = " validation ppl",
     .by_samples = true,
     .of_evaluation = true,
     .is_loss = true,
     .flag = &Flags::log_validation_ppl_to_tensorboard,
     .value = [](Report r) -> Result {
       constexpr double kMost = 20;  // Megatron's
       return shown_if(r.validation_loss.has_value(), std::exp(std::min(kMost, r.validation_loss.value_or(0))));
     }},
    {.tag = "loss-scale",
     .by_samples = true,
     .flag = &Flags::log_loss_scale_to_tensorboard,
     .value = [](Report r) -> Result { return r.step.loss_scale.value_or(1); }},
    {.tag = "world-size",
     .by_samples = true,
     .flag = &Flags::log_world_size_to_tensorboard,
     .value = [](Report r) -> Result { return number(r.world_size); }},
    {.tag = "iteration-time",
     .flag = &Flags::log_timers_to_tensorboard,
     .value = [](Report r) -> Result { return r.seconds; }},
    {.tag = "throughput",
     .flag = &Flags::log_timers_to_tensorboard,
     .further_flag = &Flags::log_throughput,
     .value = [](Report r) -> Result { return step_tflops(r); }},
    {.tag = "mem-max-allocated-bytes",
     .flag = &Flags::log_memory_to_tensorboard,
     .value = [](Report r) -> Result { return measured(r, "peak_memory_bytes"); }},
};

Result measured(Report report, std::string_view key) {
  auto next = report.step.measures.begin();
  for (const Metric& metric : kMetrics) {
    if (metric.of_rank == nullptr || next == report.step.measures.end()) continue;
    if (metric.key != nullptr && metric.key == key) return *next;
    ++next;
  }
  return std::nullopt;
}

/// What the objective and the model name, after the loss: the step's for files, the interval's mean for the log line.
void visit_further(Report report, const std::function<void(const Metric&, double)>& visit) {
  const auto& interval = report.interval;
  for (size_t i = 0; i + 1 < report.metric_names.size(); ++i) {
    const std::string& name = report.metric_names[i + 1];
    const std::string text = " " + name + ": %.6E |";
    if (i < interval.further_sums.size() && interval.losses > 0)
      visit({.text = text.c_str()}, interval.further_sums[i] / number(interval.losses));
    if (i < report.step.further.size()) visit({.key = name.c_str(), .tag = name.c_str()}, report.step.further[i]);
  }
}

Metric with_name_of_loss(Metric metric, const std::string& tag, const std::string& text) {
  if (metric.tag != nullptr) metric.tag = tag.c_str();
  if (metric.text != nullptr) metric.text = text.c_str();
  return metric;
}

}  // namespace

void for_each_metric(const StepReport& report, const std::function<void(const Metric& metric, double value)>& visit,
                     const LoggingArguments* log) {
  const auto is_set = [log](bool Flags::*flag) { return flag == nullptr || (log != nullptr && log->*flag); };
  const std::string& loss = report.metric_names.front();
  for (const Metric& metric : kMetrics) {
    if (metric.is_further) {
      visit_further(report, visit);
      continue;
    }
    if (!is_set(metric.flag) || !is_set(metric.further_flag)) continue;
    const Result value = metric.value != nullptr ? metric.value(report) : measured(report, metric.key);
    if (!value) continue;
    if (!metric.is_loss) {
      visit(metric, *value);
      continue;
    }
    const std::string tag = loss + (metric.tag == nullptr ? "" : metric.tag);
    const std::string text = " " + loss + (metric.text == nullptr ? "" : metric.text);
    visit(with_name_of_loss(metric, tag, text), *value);
  }
}

std::vector<double> measured_metrics(const HostMeasures& host) {
  std::vector<double> values;
  for (const Metric& metric : kMetrics) {
    if (metric.of_rank != nullptr) values.push_back(metric.of_rank(host));
  }
  return values;
}

void reduce_metrics(std::vector<double>& all, const std::vector<double>& of_rank) {
  if (all.empty()) {
    all = of_rank;
    return;
  }
  auto next = of_rank.begin();
  auto total = all.begin();
  for (const Metric& metric : kMetrics) {
    if (metric.of_rank == nullptr || next == of_rank.end()) continue;
    *total = metric.over_ranks == OverRanks::kMax ? std::max(*total, *next) : *total + *next;
    ++next, ++total;
  }
}

}  // namespace megashard
