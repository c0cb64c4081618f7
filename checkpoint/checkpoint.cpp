#include "checkpoint/checkpoint.h"

#include <c10/util/Exception.h>

#include "checkpoint/agreement.h"
#include "checkpoint/dcp_writer.h"
#include "checkpoint/torch_dist_writer.h"

namespace megashard {

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors,
                     const Dict& values, const ProcessGroupPtr& group, CheckpointFormat format) {
  const bool first_rank = rank_in(group) == 0;
  StepWriter step(directory, iteration);
  try {
    all_or_throw(group, [&] {
      if (first_rank) step.begin();
    });
    const auto files = format == CheckpointFormat::kTorchDist
                           ? save_torch_dist(step.folder(), tensors, values, group)
                           : save_dcp(step.folder(), tensors, values, group);
    all_or_throw(group, [&] {
      if (first_rank) step.commit(files);
    });
  } catch (...) {
    if (first_rank) step.abandon();
    throw;
  }
}

std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        std::optional<int64_t> ckpt_step) {
  const auto choices = gather_or_throw(group, [&]() -> std::string {
    if (rank_in(group) != 0) return "";
    const auto step =
        ckpt_step ? std::optional(step_at(directory, *ckpt_step)) : latest_step(directory);
    if (!step) return "";
    return step->is_release ? "release" : std::to_string(step->iteration);
  });
  if (choices[0].empty()) return std::nullopt;
  if (choices[0] == "release") return CheckpointStep{directory + "/release", 0, true};
  CheckpointStep step;
  all_or_throw(group, [&] { step = step_at(directory, std::stoll(choices[0])); });
  return step;
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
