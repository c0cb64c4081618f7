#include "checkpoint/checkpoint.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <utility>

#include "checkpoint/dcp/dcp_plan.h"
#include "checkpoint/dcp/dcp_writer.h"
#include "checkpoint/files/crc32.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/torch_dist/torch_dist_writer.h"
#include "checkpoint/values/gather_values.h"
#include "checkpoint/values/tensor_info.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {
namespace {

Value checksums(const ShardedTensors& tensors) {
  Dict sums;
  for (const auto& [key, tensor] : tensors) {
    const bool is_whole = tensor.is_replicated() && tensor.local.sizes() == at::IntArrayRef(tensor.global_sizes);
    if (!is_whole || !is_model_key(key)) continue;
    const auto local = tensor.local.detach().cpu().contiguous();
    sums.set(key, int64_t{crc32(0, local.const_data_ptr(), static_cast<int64_t>(local.nbytes()))});
  }
  return sums;
}

/// Names of the model's unsharded tensors, such as running statistics of BatchNorm, whose bytes differ between ranks.
/// Collective over `group` (null: this process alone).
std::vector<std::string> differing_copies(const ShardedTensors& tensors, const ProcessGroupPtr& group) {
  std::map<std::string, std::set<int64_t>> sums;
  for (const auto& of_rank : gather_values(group, [&] { return checksums(tensors); })) {
    for (const auto& [key, sum] : of_rank.as_dict().entries) sums[key.as_string()].insert(sum.as_int());
  }
  std::vector<std::string> names;
  for (const auto& [key, different] : sums) {
    if (different.size() > 1) names.push_back(key);
  }
  return names;
}

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
