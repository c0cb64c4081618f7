#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/manifest.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

struct FindOptions {
  std::optional<int64_t> ckpt_step{};  ///< use this iteration only
  VerifyDepth depth = VerifyDepth::kBytes;
  /// Returns other damage of a step's folder; empty if none. Null: no further check.
  std::function<std::string(const std::string& folder)> further_damage{};
  /// Receives one line on every rank if another step than the tracker's is used: the skipped steps, the damaged file,
  /// the step used instead. Null: not reported.
  std::function<void(const std::string& line)> notice{};
};

/// Finds the step that a run loads: the tracker's, or the newest undamaged one before it of the same run. Without a
/// valid tracker: the newest undamaged step, if all are of one run. Never takes steps after the tracker's: moving the
/// tracker back is intended, and so is `release`. `directory` may also be a step's folder, whose name gives its
/// iteration. Returns nullopt if there is neither a tracker nor a step, as in a first start. Throws if there are steps
/// but none is usable, if `ckpt_step` is damaged, and if something cannot be read now and may be undamaged. Collective:
/// the first rank searches, all ranks check an equal share of the bytes and return the same.
std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        const FindOptions& options = {});

}  // namespace megashard
