#pragma once

#include <ATen/core/Generator.h>

#include <string>
#include <vector>

#include "parallel/fsdp/hooked_module.h"

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
  /// Non-reentrant: operators whose outputs are kept, so that the second run does without them
  /// (torch.utils.checkpoint.create_selective_checkpoint_contexts with a list; all others are
  /// recomputed): "aten::mm", or as Python writes it "aten.mm.default". They are named as autograd
  /// sees them: a linear layer is mm or addmm. "scaled_dot_product_attention" means its fused
  /// kernels.
  std::vector<std::string> save_outputs_of = {};
};

/// From now on `module` keeps its inputs alone between forward and backward, and computes the rest
/// again in backward (torch.utils.checkpoint). The results are bit-equal to those without. Inside
/// the hooks of fully_shard on the same module. Modules may nest, run several times before
/// backward, and keep their graph for a second backward. Autocast and other thread state of the
/// first run holds in the second. Throws for a module that recomputes already, and for operators
/// that do not exist or whose outputs cannot be kept.
void recompute(HookedModule& module, const RecomputeOptions& options);

}  // namespace megashard
