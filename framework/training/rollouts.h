#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "framework/data/sample_dataset.h"
#include "framework/training/listener.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

struct RolloutOptions {
  std::string folder{};  ///< holds step_1, step_2, ...; empty: training reads data sets
  std::chrono::minutes timeout{60};
  SplitOptions sets{};  ///< how a step's set of conversations is read; without range and number
  BatchOptions batches{};
  int64_t micro_batch_size = 1;
  int64_t rank = 0;  ///< among the `ranks` that get different micro batches
  int64_t ranks = 1;
};

/// Batches of reinforcement learning: answers that other processes sample and write meanwhile, one folder a step.
/// step_N holds rank_R.bin for each rank (PrimeRollouts), or a set of conversations for all,
/// rollouts.vision.safetensors (ConversationSet). Files are there once they have their name: writers rename them.
class Rollouts {
 public:
  Rollouts(RolloutOptions options, ProcessGroupPtr world);

  /// Waits until the files of `step` are there for all ranks, or a rank is asked to stop; returns the latter's request.
  /// Throws after the timeout. Collective.
  StopRequest wait_for(int64_t step, const std::function<StopRequest()>& stop_request);
  /// This rank's micro batches of `step`, equally many on each rank. Collective.
  std::vector<Batch> read(int64_t step);
  double take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }
  /// "micro batch 2 of 4 of rollouts/step_3/rank_0.bin": of the step that was read last.
  std::string microbatch_text(size_t microbatch, size_t microbatches) const;

 private:
  std::string folder_of(int64_t step) const { return options_.folder + "/step_" + std::to_string(step); }
  std::string prime_file(int64_t step) const;
  std::string set_of(int64_t step) const { return folder_of(step) + "/rollouts"; }
  bool are_there(int64_t step) const;
  std::vector<Batch> collate(int64_t step);

  RolloutOptions options_;
  ProcessGroupPtr world_;
  std::string source_;  // the file that was read last
  double wait_seconds_ = 0;
};

}  // namespace megashard
