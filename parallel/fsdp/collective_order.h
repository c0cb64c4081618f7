#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Sees that all ranks gather and reduce the same units in the same order. Ranks that part, as by a branch of forward
/// that depends on a rank's data, take each other's bytes where the sizes are equal, and else wait for each other until
/// the deadline. Of a step that is checked the hooks keep pointers; names are compared at its end, at the store of the
/// group, which works whatever its collectives do.
class CollectiveOrder {
 public:
  /// `world`: the ranks that train. Nothing is checked where `root` is not under fully_shard, or there is one rank, or
  /// no store between them (fake groups). Both outlive it.
  CollectiveOrder(const torch::nn::Module& root, ProcessGroupPtr world);
  ~CollectiveOrder();
  CollectiveOrder(const CollectiveOrder&) = delete;
  CollectiveOrder& operator=(const CollectiveOrder&) = delete;

  /// Forward and backward of `step` follow.
  void begin_step(int64_t step);
  /// They are through on this rank's host. Collective; throws one error that names the unit in which ranks part.
  void end_step();
  /// They threw: the same sentence if ranks have parted, or nothing. Asks the others, which may be stuck, for a few
  /// seconds.
  std::string why_it_failed() noexcept;

 private:
  struct Watch;
  std::unique_ptr<Watch> watch_;  // null: nothing is checked
};

}  // namespace megashard
