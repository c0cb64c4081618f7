#include "framework/training/evaluation.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "framework/training/progress.h"
#include "framework/training/trainer.h"
#include "framework/training/training_log.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {

Evaluation::Evaluation(int64_t iterations, MultiModalModule& model, TrainStep& step, const TrainingData& data,
                       const StepReader& reader, ProcessGroupPtr world, c10::Device device, StepTimers* timers,
                       const TrainerCallbacks& callbacks, std::function<HostStats()> host_stats)
    : iterations_(iterations),
      model_(model),
      step_(step),
      data_(data),
      reader_(reader),
      world_(std::move(world)),
      device_(device),
      timers_(timers),
      callbacks_(callbacks),
      host_stats_(std::move(host_stats)) {}

StepOfRanks Evaluation::sums_over_batches(DataLoader& loader, const Microbatches& microbatches, StopRequest& stop) {
  const TimedPart timed(timers_, StepPart::kEvaluate);
  StepStats stats(world_, device_);
  StepOfRanks sums(static_cast<size_t>(world_->size()));
  ProgressClock progress(callbacks_.progress_interval);
  model_.eval();
  for (int64_t i = 1; i <= iterations_ && stop == StopRequest::kNone; ++i) {
    at::Tensor of_batch;
    for (int64_t micro = 0; micro < microbatches.count();) {
      std::vector<Batch> batches;
      for (size_t k = 0; k < step_.together(); ++k, ++micro) batches.push_back(loader.next());
      const at::Tensor own = step_.evaluate(batches);
      of_batch = of_batch.defined() ? of_batch + own : own;
    }
    const at::Tensor none = at::zeros({}, of_batch.options());
    stats.add({.grad_norm = none, .loss_scale = none, .sums = of_batch}, host_stats_());
    const StepOfRanks now = stats.finish_read().front();
    for (size_t rank = 0; rank < now.size(); ++rank) {
      auto& metrics = sums[rank].metrics;
      metrics.resize(now[rank].metrics.size());
      for (size_t m = 0; m < metrics.size(); ++m) {
        metrics[m].sum += now[rank].metrics[m].sum;
        metrics[m].count += now[rank].metrics[m].count;
      }
      stop = std::max(stop, now[rank].host.stop_request);
    }
    if (i < iterations_ && progress.is_due()) callbacks_.print_on_first_rank(evaluation_progress_line(i, iterations_));
  }
  model_.train();
  return sums;
}

Evaluation::Result Evaluation::run(const TrainingData::DatasetPtr& dataset, const std::string& where, int64_t consumed,
                                   const Microbatches& microbatches, int64_t step, bool announces) {
  if (dataset == nullptr || iterations_ == 0) return {};
  if (announces) callbacks_.print_on_first_rank(evaluating_line(iterations_ * microbatches.global_batch_size()));
  enter_phase("evaluation after step", step);
  StopRequest stop = StopRequest::kNone;
  const auto loader = data_.loader(dataset, consumed);
  const StepOfRanks sums = sums_over_batches(*loader, microbatches, stop);
  if (stop != StopRequest::kNone) return {.stop = stop};
  const StepSummary summary = reader_.summarise(sums);
  if (summary.has_loss) {
    const auto& names = step_.metric_names();
    std::vector<std::pair<std::string, double>> metrics{{names.front(), summary.loss}};
    for (size_t i = 0; i < summary.further.size(); ++i) metrics.emplace_back(names[i + 1], summary.further[i]);
    callbacks_.print_on_first_rank(evaluation_log_lines(where, metrics));
  } else if (callbacks_.sink) {
    callbacks_.sink(Severity::kWarning, "no validation loss at " + where + ": every label of its batches is masked");
  }
  if (timers_) callbacks_.print_on_first_rank(timers_->log(StepPart::kEvaluate));
  return {.loss = summary.has_loss ? std::optional(summary.loss) : std::nullopt};
}

}  // namespace megashard
