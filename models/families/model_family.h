#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"
#include "models/config/hf_config.h"
#include "models/config/vision_config.h"

namespace megashard {

/// All that is known of one family of Hugging Face models. Each file of this folder makes one, or
/// those of families that differ little; model_family.cpp lists them.
struct ModelFamily {
  std::string model_type;    ///< of config.json: "qwen3_moe"
  std::string architecture;  ///< of its `architectures`: "Qwen3MoeForCausalLM"
  /// The decoder that config.json describes, with the class names that wrap policies ask for.
  /// Throws an error for what is not computed here.
  DecoderConfig (*read)(const HfConfig& config);
  /// Of a model that sees: tower, decoder, and how they meet. Null: it reads text alone.
  VisionLanguageConfig (*read_vision)(const HfConfig& config, DecoderConfig text) = nullptr;
  WeightFiles weight_files{};
  /// For a network of Megatron's flags: what config.json of this family has beside the fields of all
  /// (hf_config_of_network.h); nothing where its class computes another network. Null: none is.
  std::optional<nlohmann::ordered_json> (*write_switches)(const DecoderConfig& network) = nullptr;
  bool has_megatron_layout = false;  ///< megatron-core's GPTModel computes it (megatron_layout.h)
};

/// Each once.
const std::vector<ModelFamily>& model_families();
/// Null: no such family.
const ModelFamily* find_family(const std::string& model_type);
/// By its model_type; an unknown one is an error that lists the known.
const ModelFamily& family_of(const HfConfig& config);

/// From a Hugging Face directory's config.json. Throws for other families, listing the known, and
/// for settings that this code does not compute.
DecoderConfig decoder_config_from_hf(const std::filesystem::path& hf_dir);
/// The same of that file's object; `path` stands in messages.
DecoderConfig decoder_config_from_hf(const nlohmann::ordered_json& config_json, const std::string& path);
DecoderConfig decoder_config_from_hf(const HfConfig& config);

}  // namespace megashard
