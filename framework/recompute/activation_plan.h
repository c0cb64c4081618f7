#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// What Megatron's flags want recomputed and offloaded, by Megatron's names of a model's parts:
/// "layer" (a whole one), "core_attn", "mlp", "moe" (the experts of a layer and their router),
/// "attn_norm", "qkv_linear", "attn_proj", "mlp_norm".
struct ActivationPlan {
  std::vector<std::string> recompute{};
  std::optional<int64_t> recompute_layers{};  ///< of "layer", the first so many; unset: all
  bool recompute_towers = false;              ///< those layers of vision towers too that are trained
  bool recompute_reentrant = false;
  std::vector<std::string> offload{};
  std::optional<int64_t> offload_layers{};  ///< of "layer"; less than there are
  int64_t min_offloaded_elements = kMinOffloadedElements;
};

/// The plan of validated arguments.
ActivationPlan activation_plan(const Arguments& arguments);

}  // namespace megashard
