#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Checks that all ranks gather and reduce the same units in the same order. Ranks that diverge, e.g. by a branch of
/// forward that depends on a rank's data, mix up their bytes if sizes match, and otherwise wait until the deadline. The
/// hooks record pointers during a checked step; names are compared at its end through the group's store, which works
/// even if the collectives hang.
class CollectiveOrder {
 public:
  /// `world`: the training ranks. Nothing is checked if `root` is not under fully_shard, if there is one rank, or if
  /// the ranks have no store (fake groups). `root` and `world` outlive it.
  CollectiveOrder(const torch::nn::Module& root, ProcessGroupPtr world);
  ~CollectiveOrder();
  CollectiveOrder(const CollectiveOrder&) = delete;
  CollectiveOrder& operator=(const CollectiveOrder&) = delete;

  /// Starts recording; call before forward and backward of `step`.
  void begin_step(int64_t step);
  /// Compares the ranks; call once forward and backward have returned on this rank's host. Collective. Throws an error
  /// that names the unit where ranks diverge.
  void end_step();
  /// Call if the step threw. Returns end_step()'s error if ranks have diverged, else nothing. Waits a few seconds for
  /// the other ranks, which may hang.
  std::string why_it_failed() noexcept;

 private:
  struct Watch;
  std::unique_ptr<Watch> watch_;  // null: nothing is checked
};

}  // namespace megashard
