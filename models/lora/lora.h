#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"

namespace megashard {

/// PEFT's LoraConfig, by Megatron-style flags (--lora-*).
struct LoraOptions {
  int64_t rank = 8;
  double alpha = 16;  ///< the adapters' sum counts alpha / rank
  double dropout = 0;
  /// Ends of the paths of linear layers (q_proj, to_out.0), or "all-linear": all except the output projection.
  std::vector<std::string> target_modules{};
};

/// Adds initialised adapters to every linear layer of these names, freezes all other parameters, and limits the model's
/// state_dict() to trained ones. Call it before fully_shard. Throws for a name without a layer, listing the existing
/// ones, and for a layer whose weight another module shares, because it could not be merged. Returns the number of
/// layers.
int64_t add_lora(MegatronModule& model, const LoraOptions& options);

/// True for the name of an adapter's parameter ("...q_proj.lora_A.weight").
bool is_lora_parameter(const std::string& name);

/// Adds forms of the adapters of experts: PEFT, and checkpoints of earlier versions, have them one by one.
void add_adapter_forms(const torch::nn::Module& model, WeightMap& map);

/// The weights with their adapters' products added and without adapters, as in a Hugging Face directory. Weights with
/// adapters are new tensors. Collective over the ranks that share the weights.
ShardedTensors merged_state_dict(MegatronModule& model);

/// The adapters of add_lora for save_hf_sharded, which then writes a directory that PEFT's PeftModel.from_pretrained
/// loads onto --hf-model: adapter_config.json and adapter_model.safetensors. Collective over the ranks that share them.
HfWeights adapter_weights(MegatronModule& model, const Arguments& arguments);

}  // namespace megashard
