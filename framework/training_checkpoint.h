#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/async_saver.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/dcp_plan.h"
#include "framework/arguments.h"
#include "framework/lr_schedule.h"
#include "framework/megatron_module.h"
#include "framework/optimizer.h"
#include "parallel/process_group.h"

namespace megashard {

/// What a checkpoint of a training run holds, by reference.
struct TrainingState {
  Arguments& arguments;  ///< consumed samples live here, as in Megatron
  MegatronModule& model;
  Optimizer* optimizer;  ///< null: weights only
  OptimizerParamScheduler* schedule;
  int64_t iteration = 0;
  double flops_so_far = 0;
  std::shared_ptr<SavePlanCache> save_plans = std::make_shared<SavePlanCache>();
};

/// Saves to arguments.save as the entries of Megatron's torch_dcp checkpoints: model, optimizer,
/// opt_param_scheduler, args, iteration, checkpoint_version, num_floating_point_operations_so_far,
/// rng_state (by rank); then removes what --most-recent-k and --save-retain-interval do not keep.
/// Collective. `notice` gets a line, on the first rank, when old checkpoints could not be removed.
/// With a saver, returns when the state is copied; the saver tells how the save ended.
void save_training_checkpoint(const TrainingState& state, const ProcessGroupPtr& group,
                              const std::function<void(const std::string& line)>& notice,
                              AsyncSaver* saver = nullptr);

struct LoadedTraining {
  bool reseeded = false;  ///< other world size: random numbers go on from (seed, iteration, rank)
};

/// Loads a step (find_step's, of checkpoint/checkpoint.h) by --finetune, --no-load-optim and
/// --no-load-rng; sets state.iteration, the arguments' consumed samples, the schedule and the
/// generators. Collective; throws when names or sizes do not fit.
LoadedTraining load_training_checkpoint(TrainingState& state, const CheckpointStep& step,
                                        const ProcessGroupPtr& group);

}  // namespace megashard
