#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace megashard {

/// Which modules of a model are units, and how far ahead they are gathered. Ours: PyTorch regroups gathers and
/// reductions in its compiler (bucketing of torch._inductor), which sees graphs; here modules are regrouped.
struct UnitPlan {
  /// Paths from the root, in the order in which the modules run. The modules of one unit are gathered when the first of
  /// them runs, resharded after the last, and reduced together. What lies in none of them belongs to the root.
  using Unit = std::vector<std::string>;
  std::vector<Unit> units;
  int forward_prefetch = 0;   ///< units that one gathers ahead of itself; 0: none
  int backward_prefetch = 0;  ///< 0: FSDP2's own, the one that ran before

  bool operator==(const UnitPlan&) const = default;
};

/// As the model is grouped now. `root` itself is none of the units.
UnitPlan unit_plan_of(const torch::nn::Module& root);

/// Groups the parameters of a model under fully_shard anew, between steps: what is computed stays the same, bit for bit
/// where two ranks add. Parameters, gradients that are complete, optimizers and checkpoints know nothing of it.
/// Settings of a unit (reshard_after_forward, communication) are those of the unit where its first parameter was; a
/// module on which fully_shard was called goes on casting its inputs and outputs. Throws before anything has changed:
/// for a path that names no module with hooks, for modules of other casts in one unit, for a tied weight that would lie
/// in two units, during forward or backward, and while gradients wait for their reduction.
void apply_unit_plan(torch::nn::Module& root, const UnitPlan& plan);

}  // namespace megashard
