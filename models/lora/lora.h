#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "framework/modules/megatron_module.h"

namespace megashard {

/// PEFT's LoraConfig, by Megatron-style flags (--lora-*).
struct LoraOptions {
  int64_t rank = 8;
  double alpha = 16;  ///< the adapters' sum counts alpha / rank
  double dropout = 0;
  /// Last names of linear layers (q_proj, down_proj), or "all-linear": all but the output's.
  std::vector<std::string> target_modules{};
};

/// Gives every linear layer of these names adapters with first values, freezes all else, and lets
/// the model's state_dict() hold what is trained alone. Before fully_shard. A name without a layer
/// is an error that lists those there are; so is a layer whose weight another module shares, with
/// which it could not be merged. Returns the number of layers.
int64_t add_lora(MegatronModule& model, const LoraOptions& options);

/// Whether a parameter's name is an adapter's ("...q_proj.lora_A.weight").
bool is_lora_parameter(const std::string& name);

/// The weights without adapters, each with the product of its adapters added: what a model
/// directory of Hugging Face holds. New tensors where there are adapters. Collective over the ranks
/// that share the weights.
ShardedTensors merged_state_dict(MegatronModule& model);

}  // namespace megashard
