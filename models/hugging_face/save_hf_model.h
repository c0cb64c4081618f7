#pragma once

#include "checkpoint/hugging_face/hf_config.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Implements --save-hf: writes a directory for transformers' from_pretrained.

/// Checks the directory before training, so that saving at the end does not fail. Collective over `group`. Throws
/// UsageError if it is that of --hf-model or, without --overwrite, contains weights, a step or a run (content_refusal),
/// or if transformers has no architecture for the network of the flags.
/// `file`: --hf-model's config.json; null without it. Returns the config.json that will be written.
nlohmann::ordered_json prepare_hf_model(const Arguments& arguments, const HfConfig* file, const ProcessGroupPtr& group);

/// Dtype of the weights written by save_hf_model: --save-hf-dtype; otherwise the dtype of most bytes in the files of
/// --hf-model, if its weights are trained; without those, or if the parameters are stored in 16 bits, the parameters'
/// dtype.
at::ScalarType hf_model_dtype(const Arguments& arguments);

/// The weights of --hf-model's kind for save_hf_sharded, which writes beside them the files of --hf-model; adapters are
/// merged. Names and forms are as published, with `packs_experts` the experts of a layer packed. The dtype is the
/// caller's. Collective over the ranks that share them.
HfWeights whole_weights(MegatronModule& model, const Arguments& arguments, bool packs_experts);

/// All ranks write the model's weights (save_hf_sharded: in hf_model_dtype, tied ones once, experts as published by
/// their family or, with --save-hf-stacked-experts, packed), then the files beside the weights of
/// --hf-model, and `config`, of prepare_hf_model: --hf-model's, or that of the Llama, Qwen2 or Qwen3 that the flags
/// describe, with this run's tying and the weights' dtype. Adapters are merged into the weights and also written to the
/// folder's adapter/ (adapter_weights). Collective.
void save_hf_model(MegatronModule& model, const nlohmann::ordered_json& config, const Arguments& arguments,
                   const ProcessGroupPtr& group);

}  // namespace megashard
