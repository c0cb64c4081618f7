#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace megashard {

/// Files beside the weights in a Hugging Face model directory: config.json, tokenizer, generation settings, ...

/// Copies all assets, synced; for HfSaveOptions::beside. Throws an error that names the file.
void copy_hf_assets(const std::string& from, const std::string& to);

/// Reads config.json; nullopt if there is none or `directory` is empty. Throws if it is not a JSON object or has
/// duplicate keys.
std::optional<nlohmann::ordered_json> read_hf_config(const std::string& directory);
/// Reads generation_config.json, the defaults of transformers' generate(). Otherwise as read_hf_config.
std::optional<nlohmann::ordered_json> read_generation_config(const std::string& directory);
/// As read_hf_config. Throws an error that names --hf-model if there is none.
nlohmann::ordered_json need_hf_config(const std::string& directory);
void write_hf_config(const std::string& directory, const nlohmann::ordered_json& config);

}  // namespace megashard
