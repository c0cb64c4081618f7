#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/steps/async_saver.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/optimizer_param_scheduler.h"
#include "framework/training/optimizers/optimizer.h"
#include "framework/training/progress.h"
#include "parallel/collectives/process_group.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

/// What a checkpoint of a training run holds, by reference.
struct TrainingState {
  const Arguments& arguments;
  MegatronModule& model;
  Optimizer* optimizer;               ///< null: weights only
  OptimizerParamScheduler* schedule;  ///< null: weights only
  c10::Device device = c10::kCPU;     ///< whose random states count besides the CPU's
  Progress progress{};
  std::optional<std::string> loaded_from{};  ///< folder of the steps of which one was loaded
  std::vector<int64_t> damaged_steps{};      ///< of arguments.save, passed over by the load
  RunHistory run{};                          ///< on the first rank: whose steps are saved
  bool replaces_other_runs = false;          ///< the next save removes their steps
  GradScaler* scaler = nullptr;              ///< null: losses are not scaled
  std::shared_ptr<SavePlanCache> save_plans = std::make_shared<SavePlanCache>();
};

/// Whether --ckpt-format can hold the state: throws an error for what it cannot, returns one to
/// be shown for what is unusual (check_torch_dist_shards), or nothing.
std::string check_save_format(const TrainingState& state);

/// A step has at least so many bytes, of what this rank knows.
int64_t least_step_bytes(const TrainingState& state);

/// Saves to arguments.save in --ckpt-format, as the entries of Megatron's checkpoints: model,
/// optimizer (with the dynamic loss scale), opt_param_scheduler, args, iteration, checkpoint_version,
/// num_floating_point_operations_so_far, rng_state (by rank); then removes what --most-recent-k and
/// --save-retain-interval do not keep. Collective. `notice` gets a line, on the first rank, when
/// old checkpoints could not be removed. With a saver, returns when the state is copied; the saver
/// tells how the save ended, and `notice` is called from its start() or wait(), on their thread.
void save_training_checkpoint(const TrainingState& state, const ProcessGroupPtr& group,
                              const std::function<void(const std::string& line)>& notice, AsyncSaver* saver = nullptr);

/// Loads a step (find_step's, of checkpoint/checkpoint.h) by --no-load-optim, --no-load-rng and
/// --dist-ckpt-strictness; without `weights_only` (--finetune) also sets the progress, the schedule and the generators.
/// Returns lines for the log. Another world size is fine: random numbers then go on from (seed, iteration, rank).
/// Arguments, batch sizes, names and sizes are checked before anything is changed; a PyTorch step, without args,
/// iteration or schedule, goes on from the step's number. Collective.
std::vector<std::string> load_training_checkpoint(TrainingState& state, const CheckpointStep& step,
                                                  const ProcessGroupPtr& group, bool weights_only = false);

/// Whether --save is the folder that was loaded from, or --load, however they are written.
bool saves_where_it_loads(const TrainingState& state);

/// Whether a load may leave weights at their first values (--dist-ckpt-strictness), which must
/// then be there.
bool may_lack_weights(const Arguments& arguments);

}  // namespace megashard
