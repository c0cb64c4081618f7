#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/config/decoder_config.h"
#include "models/config/weight_files.h"
#include "models/network/network.h"

namespace megashard {

/// A family of Hugging Face models. Each file of this folder registers one or several similar ones.
struct ModelFamily {
  std::string model_type;    ///< in config.json: "qwen3_moe"
  std::string architecture;  ///< in its `architectures`: "Qwen3MoeForCausalLM"
  /// Reads the decoder from config.json, with class names for wrap policies. Throws for unsupported settings.
  DecoderConfig (*read)(const HfConfig& config);
  /// Describes the encoder beside the decoder. Null: text only.
  EncoderSpecPtr (*encoder)(const HfConfig& config, const DecoderConfig& text) = nullptr;
  /// Describes layer `index` of the decoder. Null: decoder_layer().
  LayerSpec (*layer)(const HfConfig& config, const DecoderConfig& network, int64_t index) = nullptr;
  WeightFiles weight_files{};
  /// Describes files whose names depend on config.json. Null: weight_files.
  WeightFiles (*files)(const HfConfig& config) = nullptr;
  /// For a network of Megatron's flags: this family's fields of config.json besides the common ones
  /// (save_hf_model); nullopt if its class does not support the network. Null: supports none.
  std::optional<nlohmann::ordered_json> (*write_switches)(const DecoderConfig& network) = nullptr;
  /// Says in a config.json to be written that the models of WeightFiles::others are not there. Null: nothing to say.
  void (*write_part)(nlohmann::ordered_json& config) = nullptr;
  bool has_megatron_layout = false;  ///< megatron-core's GPTModel can compute it (megatron_layout.h)
};

/// A static object of a family's file: makes it known.
struct RegisterFamily {
  explicit RegisterFamily(ModelFamily family);
};

/// All families, in the order of their model types.
const std::vector<ModelFamily>& model_families();
/// Null for unknown families.
const ModelFamily* find_family(const std::string& model_type);
/// The family of a config's model_type. Throws and lists the known ones if it is unknown.
const ModelFamily& family_of(const HfConfig& config);

/// How the files of that config.json have the weights.
WeightFiles weight_files_of(const HfConfig& config);

/// True if `architectures` of config.json names a classifier, whose head is `score`.
bool is_classifier(const nlohmann::ordered_json& config);
/// The class of transformers that is the family's decoder with the head `score`; nullopt if there is none.
std::optional<std::string> classifier_of(const ModelFamily& family);

/// Number of layers of multi-token prediction that config.json says its files have, of those that can be trained.
int64_t prediction_depth(const HfConfig& config, const ModelFamily& family);

/// Throws for unknown families, listing the known ones, and for unsupported settings.
DecoderConfig decoder_config_from_hf(const HfConfig& config);
/// The whole network. `change`: changes the configuration before the layers are described (flags).
Network network_from_hf(const HfConfig& config, const std::function<void(DecoderConfig&)>& change = {});

}  // namespace megashard
