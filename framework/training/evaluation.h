#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "framework/arguments/microbatches.h"
#include "framework/training/listener.h"
#include "framework/training/step_reader.h"
#include "framework/training/step_timers.h"
#include "framework/training/train_step.h"
#include "framework/training/training_data.h"

namespace megashard {

struct TrainerCallbacks;

/// The loss of a validation or test set, over --eval-iters global batches and all ranks. References outlive it.
class Evaluation {
 public:
  struct Result {
    std::optional<double> loss{};           ///< nullopt: no data set, no label, or stopped
    StopRequest stop = StopRequest::kNone;  ///< of any rank; it has ended the evaluation
  };

  /// `timers`: null without --timing-log-level. `host_stats`: of this rank, now.
  Evaluation(int64_t iterations, MultiModalModule& model, TrainStep& step, const TrainingData& data,
             const StepReader& reader, ProcessGroupPtr world, c10::Device device, StepTimers* timers,
             const TrainerCallbacks& callbacks, std::function<HostStats()> host_stats);

  /// Evaluates `dataset` (null: nothing) from the sample after `consumed` on, after step `step`. Prints the loss.
  /// `announces`: also prints that it begins. Collective.
  Result run(const TrainingData::DatasetPtr& dataset, const std::string& where, int64_t consumed,
             const Microbatches& microbatches, int64_t step, bool announces);

 private:
  /// Adds up the statistics of all batches; `stop` is what has ended it.
  StepOfRanks sums_over_batches(DataLoader& loader, const Microbatches& microbatches, StopRequest& stop);

  int64_t iterations_;
  MultiModalModule& model_;
  TrainStep& step_;
  const TrainingData& data_;
  const StepReader& reader_;
  ProcessGroupPtr world_;
  c10::Device device_;
  StepTimers* timers_;
  const TrainerCallbacks& callbacks_;
  std::function<HostStats()> host_stats_;
};

}  // namespace megashard
