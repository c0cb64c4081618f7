#pragma once

#include <torch/nn/module.h>

#include <filesystem>

namespace megashard {

/// Fills the parameters of a model, sharded or not, from a Hugging Face directory's safetensors, by
/// name, converting to the parameters' dtype. Each rank reads its own rows only; nothing is
/// communicated. Tied weights: a parameter with several names takes the values of the first name,
/// in registration order, that the files have; an lm_head.weight that they lack takes
/// model.embed_tokens.weight (a tied model trained untied), and an expert's weight its rows of a
/// stacked one (stacked_experts.h). A model with PublishedNames is read under those names or its
/// own. Anything else that is missing, left
/// over, or of other sizes is an error that lists it, and nothing is changed.
void load_hf_weights(torch::nn::Module& module, const std::filesystem::path& hf_dir);

}  // namespace megashard
