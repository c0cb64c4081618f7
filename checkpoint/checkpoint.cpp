#include "checkpoint/checkpoint.h"

#include <c10/util/Exception.h>

#include "checkpoint/steps/agreement.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"

namespace megashard {

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors,
                     const Dict& values, const ProcessGroupPtr& group, const SaveOptions& options) {
  const bool first_rank = rank_in(group) == 0;
  StepWriter step(directory, iteration);
  try {
    all_or_throw(group, [&] {
      if (first_rank) step.begin();
    });
    const auto files =
        options.format == CheckpointFormat::kTorchDist
            ? save_torch_dist(step.folder(), tensors, values, group, options.plans.get())
            : save_dcp(step.folder(), tensors, values, group, options.plans.get(), options.tied);
    all_or_throw(group, [&] {
      if (first_rank) step.commit(files, options.run);
    });
  } catch (...) {
    if (first_rank) step.abandon();
    meet_after_failure(group);
    throw;
  }
  if (!options.retention.removes()) return;
  const auto say_why = [&](const std::string& why) {  // the step is saved all the same
    if (first_rank && options.notice) options.notice("old checkpoints are kept: " + why);
  };
  try {
    find_step(directory, group, {.ckpt_step = iteration});  // throws unless its bytes are right
    all_or_rethrow(group, [&] {  // the others wait here, not in a collective of training's
      if (first_rank) remove_old_steps(directory, iteration, options.retention);
    });
  } catch (const c10::Error& error) {
    say_why(error.what_without_backtrace());
  } catch (const std::exception& error) {
    say_why(error.what());
  }
}

LoadedCheckpoint load_checkpoint(const CheckpointStep& step, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options) {
  LoadedCheckpoint loaded;
  loaded.report = load_dcp(step.folder, tensors, &loaded.values, group, options);
  return loaded;
}

LoadedCheckpoint load_checkpoint(const std::string& directory, const ShardedTensors& tensors,
                                 const ProcessGroupPtr& group, const LoadOptions& options) {
  const auto step = find_step(directory, group);
  TORCH_CHECK(step, directory, " holds no checkpoint (no latest_checkpointed_iteration.txt); check the path");
  return load_checkpoint(*step, tensors, group, options);
}

}  // namespace megashard
