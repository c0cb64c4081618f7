#pragma once

#include <torch/nn/module.h>

#include <filesystem>

#include "framework/diagnostics.h"

namespace megashard {

/// Fills the parameters of a model, sharded or not, from a Hugging Face directory's safetensors, by
/// name, converting to the parameters' dtype. Each rank reads its own rows only; nothing is
/// communicated. A model with PublishedNames is read under those names or its own, an expert's weight
/// also as its rows of a stacked one (stacked_experts.h), and a decoder's without "model." where none
/// has it (transformers' AutoModel). An lm_head.weight that the files lack takes the embeddings, and
/// `sink` hears so. Every tensor of the files is used, or equal to what is used under another name of
/// the parameter (tied weights), or told as following from config.json. Anything else that is
/// missing, left over, or of other sizes is an error that lists it, and nothing is changed.
void load_hf_weights(
    torch::nn::Module& module, const std::filesystem::path& hf_dir,
    const DiagnosticSink& sink = [](Severity, const std::string&) {});

}  // namespace megashard
