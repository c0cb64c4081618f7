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
  std::optional<int64_t> ckpt_step{};  ///< this one or none
  VerifyDepth depth = VerifyDepth::kBytes;
  /// What else is wrong with a step's folder; empty: nothing. Null: nothing else matters.
  std::function<std::string(const std::string& folder)> further_damage{};
  /// Gets one line, on every rank, when another step than the tracker's is found: which was passed
  /// over, which file is damaged, what is used instead. Null: nobody is told.
  std::function<void(const std::string& line)> notice{};
};

/// The step that a run loads: the tracker's, or the newest whole one before it of the same run;
/// without a legible tracker, the newest whole one that is there, where all are of one run. Steps
/// after the tracker's are never taken: whoever sets the tracker back means it, and so does one
/// that says `release`. `directory` may be the folder of a step, whose name says its iteration:
/// that one. Nothing when there are neither tracker nor steps, as in a first start. Throws when
/// there are steps and none will do, when `ckpt_step` is damaged, and when something cannot be
/// read now: that may be whole. Collective: the first rank looks, all check their part of the
/// files and read as many bytes as the others, and all return the same.
std::optional<CheckpointStep> find_step(const std::string& directory, const ProcessGroupPtr& group,
                                        const FindOptions& options = {});

}  // namespace megashard
