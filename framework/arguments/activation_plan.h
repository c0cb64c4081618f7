#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megashard {

struct Arguments;

/// Saved tensors with fewer elements stay on the device (Megatron's --min-offloaded-tensor-size).
inline constexpr int64_t kMinOffloadedElements = int64_t{1} << 20;

/// Parts of a model that Megatron's flags recompute and offload, by Megatron's names: "layer" (a whole one),
/// "core_attn", "mlp", "moe" (a layer's experts and router), "attn_norm", "qkv_linear", "attn_proj", "mlp_norm".
struct ActivationPlan {
  std::vector<std::string> recompute{};
  std::optional<int64_t> recompute_layers{};  ///< for "layer": the first ones; unset: all
  bool recompute_towers = false;              ///< also trained layers of vision towers
  bool recompute_reentrant = false;
  std::vector<std::string> offload{};
  std::optional<int64_t> offload_layers{};  ///< for "layer"; fewer than all
  int64_t min_offloaded_elements = kMinOffloadedElements;
};

/// The plan of validated arguments.
ActivationPlan activation_plan(const Arguments& arguments);

}  // namespace megashard
