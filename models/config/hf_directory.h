#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace megashard {

/// config.json of a Hugging Face model directory. Throws one error with the remedy for a
/// directory that has none (PEFT adapters, GGUF files, Meta's form, checkpoints of a run, the hub's
/// cache) and for a model whose weights are quantised.
nlohmann::ordered_json need_model_config(const std::string& directory);

}  // namespace megashard
