#include "checkpoint/checkpoint.h"

#include "checkpoint/agreement.h"
#include "checkpoint/dcp_writer.h"

namespace megashard {

void save_checkpoint(const std::string& directory, int64_t iteration, const ShardedTensors& tensors,
                     const Dict& values, const ProcessGroupPtr& group) {
  StepWriter step(directory, iteration);
  const auto on_first_rank = [&](void (StepWriter::*action)()) {
    all_or_throw(group, [&] {
      if (rank_in(group) == 0) (step.*action)();
    });
  };
  on_first_rank(&StepWriter::begin);
  save_dcp(step.folder(), tensors, values, group);
  on_first_rank(&StepWriter::commit);
}

std::optional<LoadedCheckpoint> load_checkpoint(const std::string& directory,
                                                const ShardedTensors& tensors,
                                                const ProcessGroupPtr& group,
                                                const LoadOptions& options,
                                                std::optional<int64_t> ckpt_step) {
  // The first rank chooses: a tracker that moves meanwhile must not lead ranks to different steps.
  const auto choices = gather_or_throw(group, [&]() -> std::string {
    if (rank_in(group) != 0) return "";
    const auto step =
        ckpt_step ? std::optional(step_at(directory, *ckpt_step)) : latest_step(directory);
    if (!step) return "";
    return step->is_release ? "release" : std::to_string(step->iteration);
  });
  if (choices[0].empty()) return std::nullopt;
  LoadedCheckpoint loaded;
  if (choices[0] == "release") {
    loaded.step = {directory + "/release", 0, true};
  } else {
    all_or_throw(group, [&] { loaded.step = step_at(directory, std::stoll(choices[0])); });
  }
  loaded.report = load_dcp(loaded.step.folder, tensors, &loaded.values, group, options);
  return loaded;
}

}  // namespace megashard
