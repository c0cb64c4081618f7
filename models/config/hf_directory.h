#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace megashard {

/// Reads config.json of a Hugging Face model directory. Throws an error with the remedy for a directory without one
/// (PEFT adapters, GGUF files, Meta's format, checkpoints of a run, the hub's cache) and for models with quantised
/// weights.
nlohmann::ordered_json need_model_config(const std::string& directory);

}  // namespace megashard
