#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/hugging_face/hf_files.h"
#include "parallel/collectives/process_group.h"
#include "parallel/sharded_tensor.h"

namespace megashard {

struct PublishedStepsOptions {
  std::string folder{};
  int64_t full_interval = 1;               ///< every so many are whole, the others have changed values alone
  std::optional<int64_t> keep_interval{};  ///< steps that are multiples of it stay
};

/// Weights of steps for inference engines, as prime-rl's trainer writes them: FOLDER/step_N with the weights as Hugging
/// Face files and, last, an empty file STABLE. A folder appears when it is whole. Besides the last step and the one
/// before, folders go, unless a later one needs them.
///
/// Instead of the weights a folder may have changes since `base_step`, the step before, which the files' metadata name:
/// delta-RRRRR-of-NNNNN.safetensors of each rank, with NAME.idx (positions in the flat tensor, int32, or int64 for
/// large ones) and NAME.val (the new values). checksums.json has a number for each tensor, whole or changed: the
/// elements' (bits + 1) * (position * 0x9E3779B97F4A7C15 | 1), summed modulo 2^64.
class PublishedSteps {
 public:
  explicit PublishedSteps(PublishedStepsOptions options) : options_(std::move(options)) {}

  /// Writes a step. `tensors` are on the host, in the files' names and dtypes, with this rank's pieces. Collective over
  /// `group` (null: this process alone).
  void write(int64_t step, const ShardedTensors& tensors, const ProcessGroupPtr& group, const HfSaveOptions& files);

 private:
  void write_changes(const std::string& into, const ShardedTensors& tensors, const ProcessGroupPtr& group) const;
  void remove_before(int64_t step) const;

  PublishedStepsOptions options_;
  ShardedTensors last_;                 // last_step_'s, to find what has changed; empty: every step is whole
  std::optional<int64_t> last_step_{};  // unset: this run has written none
  int64_t whole_step_ = 0;              // the last one that was written whole
  int64_t since_whole_ = 0;             // number of steps written since
};

}  // namespace megashard
