#pragma once

#include <torch/nn/module.h>

#include <filesystem>

#include "framework/diagnostics.h"

namespace megashard {

/// Loads the parameters of a model, sharded or not, by name from a Hugging Face directory's safetensors, converted to
/// the parameters' dtype. Each rank reads only its own shards; no communication. The forms and names
/// of MegatronModule::weight_map() are read, or the model's own, and a decoder's weights without "model." if no name
/// has it (transformers' AutoModel). A missing lm_head.weight is copied from the embeddings, and a missing score.weight
/// is drawn by weight_init(), the files' lm_head then not read; both are reported to `sink`. Every tensor in the files
/// must be used, or be equal to the used one under another name of the parameter (tied weights), or follow from
/// config.json, which is reported. Otherwise throws and lists what is missing, unexpected or of other sizes; the model
/// is then unchanged.
void load_hf_weights(
    torch::nn::Module& module, const std::filesystem::path& hf_dir,
    const DiagnosticSink& sink = [](Severity, const std::string&) {});

}  // namespace megashard
