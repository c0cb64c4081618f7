#pragma once

#include <ATen/core/Generator.h>

#include <string>
#include <vector>

#include "parallel/fsdp/hooked_module.h"

namespace megashard {

struct RecomputeOptions {
  /// true: forward runs without grad, and its own backward runs inside the outer one; supports only loss.backward() (no
  /// autograd::grad, no double backward). false: tensors that autograd would save are dropped and recomputed when
  /// backward first needs them.
  bool use_reentrant = false;
  /// Repeats random numbers, as for dropout: the states of the default CPU generator and the generators of the inputs'
  /// devices are set for the second run and restored afterwards.
  bool preserve_rng_state = true;
  /// Non-reentrant: the second run stops after the last tensor that backward needs.
  bool early_stop = true;
  /// Additional generators that the forward uses, such as a rank's own if ranks are threads: they share the default CPU
  /// generator, so their draws interleave.
  std::vector<at::Generator> generators = {};
  /// Non-reentrant: operators whose outputs are kept, so that the second run skips them
  /// (torch.utils.checkpoint.create_selective_checkpoint_contexts with a list; all others are recomputed): "aten::mm",
  /// or as in Python "aten.mm.default". Names are those that autograd sees: a linear layer is mm or addmm.
  /// "scaled_dot_product_attention" is its fused kernels.
  std::vector<std::string> save_outputs_of = {};
};

/// Makes `module` keep only its inputs between forward and backward and recompute the rest in backward
/// (torch.utils.checkpoint). Results are bit-equal. Runs inside the hooks of fully_shard on the same module. Modules
/// may nest, run several times before backward, and keep their graph for a second backward. The second run uses
/// autocast and other thread state of the first. Throws if the module already has recompute or activation offload, for
/// operators that do not exist or whose outputs cannot be kept, and for save_outputs_of with use_reentrant.
void recompute(HookedModule& module, const RecomputeOptions& options);

}  // namespace megashard
