#pragma once

#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// --save-hf: a directory that transformers' from_pretrained loads.

/// Before training, so that its end does not fail; collective over `group`. Throws a UsageError when
/// it is --hf-model's own or, without --overwrite, holds weights, a step or a run (content_refusal),
/// or when transformers has no architecture for the network of the flags.
void prepare_hf_model(const Arguments& arguments, const ProcessGroupPtr& group);

/// The dtype of the weights that save_hf_model writes: --save-hf-dtype; without it that of most bytes in the files of
/// --hf-model, whose weights are trained, or where there are none, or the parameters are stored in 16 bits, theirs.
at::ScalarType hf_model_dtype(const Arguments& arguments);

/// All ranks write the model's weights (save_hf_sharded: in hf_model_dtype, tied ones once, experts as
/// their family publishes them or, by --save-hf-stacked-experts, as stack_experts()); then come the
/// files beside the weights of --hf-model, and config.json: --hf-model's, or that of the Llama,
/// Qwen2 or Qwen3 which the flags describe, with the tying of this run and the dtype of the weights. Adapters are
/// merged into the weights, and by themselves in the folder's adapter/ (save_adapters.h).
/// Collective.
void save_hf_model(MegatronModule& model, const Arguments& arguments, const ProcessGroupPtr& group);

}  // namespace megashard
