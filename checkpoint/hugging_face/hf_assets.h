#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace megashard {

/// What lies beside the weights in a Hugging Face model directory: config.json, tokenizer,
/// generation settings, ...

/// Copies all of it, synced; for HfSaveOptions::beside. Throws naming the file.
void copy_hf_assets(const std::string& from, const std::string& to);

/// config.json; nothing when there is none, or the directory is empty text. Throws when it is no
/// JSON object, or has a key twice.
std::optional<nlohmann::ordered_json> read_hf_config(const std::string& directory);
/// generation_config.json: what transformers' generate() goes by; else as above.
std::optional<nlohmann::ordered_json> read_generation_config(const std::string& directory);
/// As read_hf_config; throws, naming --hf-model, when there is none.
nlohmann::ordered_json need_hf_config(const std::string& directory);
void write_hf_config(const std::string& directory, const nlohmann::ordered_json& config);

}  // namespace megashard
