#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/training/optimizer_param_scheduler.h"
#include "framework/training/optimizers/optimizer_options.h"
#include "framework/training/output_paths.h"
#include "framework/training/run_listeners.h"
#include "framework/training/train_step.h"
#include "framework/training/training_data.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

/// Plan of a training, in slices that its parts define. After it only code that records or compares the arguments
/// reads them.
struct TrainingPlan {
  RunLength length{};
  TrainingDataOptions data{};
  std::string objective{};  ///< of objectives(), with the values of its flags
  std::map<std::string, double> objective_options{};
  TrainStepOptions step{};
  OptimizerOptions optimizer{};
  SchedulerOptions schedule{};
  std::optional<GradScaler::Options> loss_scale{};  ///< unset: losses are not scaled
  ContextParallelArguments sequences{};             ///< how ranks share each sequence
  DueOptions due{};
  CheckpointArguments saves{};
  LoggingArguments log{};
  std::vector<std::string> callbacks{};  ///< of callbacks(), with the values of their flags
  std::map<std::string, double> callback_options{};
  std::vector<OutputPath> outputs{};  ///< tried before the first step
  std::string first_weights{};        ///< folder of the Hugging Face files that were loaded; empty: none
  std::string frozen_weights{};       ///< --lora-r: folder of the weights under the adapters
  /// Checkpoints and --metrics-file record them, and a load compares them. Must outlive the plan.
  const Arguments& arguments;
};

/// Makes the plan from validated arguments. `sets`: data_options().
TrainingPlan plan_training(const Arguments& arguments, DataOptions sets);

}  // namespace megashard
