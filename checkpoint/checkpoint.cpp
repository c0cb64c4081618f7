#include "checkpoint/checkpoint.h"

#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "parallel/collectives/agreement.h"

namespace megashard {

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors, const Dict& values,
                     const ProcessGroupPtr& group, const SaveOptions& options) {
  const bool first_rank = rank_in(group) == 0;
  StepWriter step(directory, iteration);
  try {
    all_or_throw(group, [&] {
      if (first_rank) step.begin();
    });
    const auto files = options.format == CheckpointFormat::kTorchDist
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
  try {
    all_or_rethrow(group, [&] {  // the others wait here, not in a collective of training's
      if (first_rank) remove_old_steps(directory, iteration, options.retention);
    });
  } catch (const std::exception& error) {  // the step is saved all the same
    if (first_rank && options.notice) options.notice("old checkpoints are kept: " + error_text(error));
  }
}

}  // namespace megashard
