#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace megashard {

/// Grouping of a model's modules into units, and prefetch depths. Ours: PyTorch regroups all-gathers and reductions in
/// its compiler (bucketing of torch._inductor), on graphs; this regroups modules.
struct UnitPlan {
  /// Module paths from the root, in order of execution. A unit's modules are unsharded before the first of them runs,
  /// resharded after the last, and reduced together. Modules of no unit belong to the root.
  using Unit = std::vector<std::string>;
  std::vector<Unit> units;
  int forward_prefetch = 0;   ///< number of units that each unit prefetches; 0: none
  int backward_prefetch = 0;  ///< 0: FSDP2's default, the unit that ran before

  bool operator==(const UnitPlan&) const = default;
};

/// Current grouping of the model; the root is not listed.
UnitPlan unit_plan_of(const torch::nn::Module& root);

/// Regroups the parameters of a model under fully_shard, between steps. Results stay the same (bit-identical for two
/// ranks); parameters, complete gradients, optimizers and checkpoints are unaffected. A unit takes its settings
/// (reshard_after_forward, communication) from the former unit of its first parameter; a module on which fully_shard
/// was called still casts its inputs and outputs. Throws, without changes, for a path of no module with hooks, for
/// modules with different casts in one unit, for a tied weight in two units, during forward or backward, and while
/// gradients wait for their reduction.
void apply_unit_plan(torch::nn::Module& root, const UnitPlan& plan);

}  // namespace megashard
