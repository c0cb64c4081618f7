#pragma once

#include <ATen/core/Generator.h>

#include <vector>

#include "parallel/hooked_module.h"

namespace megashard {

struct RecomputeOptions {
  /// true: forward runs without grad, and a backward of its own runs inside the outer one; only
  /// loss.backward() may use it (no autograd::grad, no double backward). false: what autograd would
  /// save is dropped and computed again when backward first asks for it.
  bool use_reentrant = false;
  /// Dropout draws the same numbers again: the state of the default CPU generator, and of the
  /// generators of the inputs' devices, is put back for the second run and restored after it.
  bool preserve_rng_state = true;
  /// Non-reentrant: the second run ends at the last tensor that backward needs.
  bool early_stop = true;
  /// Further generators that the forward draws from, such as a rank's own where ranks are threads:
  /// the default CPU generator is one per process, and their draws interleave.
  std::vector<at::Generator> generators = {};
};

/// From now on `module` keeps its inputs alone between forward and backward, and computes the rest
/// again in backward (torch.utils.checkpoint). The results are bit-equal to those without. Inside
/// the hooks of fully_shard on the same module. Modules may nest, run several times before
/// backward, and keep their graph for a second backward. Autocast and other thread state of the
/// first run holds in the second. Throws for a module that recomputes already.
void recompute(HookedModule& module, const RecomputeOptions& options);

}  // namespace megashard
