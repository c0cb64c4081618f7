#include "checkpoint/checkpoint.h"

#include <utility>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/dcp/differing_copies.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/agreement.h"

namespace megashard {
namespace {

/// Logs tensors that differ between ranks, once for all saves that share `options.plans`. Collective.
void tell_differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group, const SaveOptions& options) {
  if (group == nullptr || group->size() == 1) return;
  const auto names = differing_copies(tensors, group);
  const bool is_told = options.plans != nullptr && std::exchange(options.plans->told_of_copies, !names.empty());
  if (names.empty() || is_told || rank_in(group) != 0 || !options.notice) return;
  options.notice("these differ between the ranks, and no sharding keeps them equal: " + listed(names) +
                 "; a checkpoint has those of the first rank, which every rank gets when it is loaded");
}

}  // namespace

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors, const Dict& values,
                     const ProcessGroupPtr& group, const SaveOptions& options) {
  const bool first_rank = rank_in(group) == 0;
  StepWriter step(directory, iteration);
  try {
    all_or_throw(group, [&] {
      if (first_rank) step.begin();
    });
    tell_differing_copies(tensors, group, options);
    const auto files = options.format == CheckpointFormat::kTorchDist
                           ? save_torch_dist(step.folder(), tensors, values, group, options.plans.get())
                           : save_dcp(step.folder(), tensors, values, group, options.plans.get(),
                                      {.tied = options.tied, .bare_names = options.bare_names});
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
    all_or_rethrow(group, [&] {  // the other ranks wait here, not in a training collective
      if (first_rank) remove_old_steps(directory, iteration, options.retention);
    });
  } catch (const std::exception& error) {  // the step is saved nevertheless
    if (first_rank && options.notice) options.notice("old checkpoints are kept: " + error_text(error));
  }
}

}  // namespace megashard
