#include "models/families/model_family.h"

#include <algorithm>

#include "models/config/hf_directory.h"

namespace megashard {

// One line per family, here and in the list.
ModelFamily llama();
ModelFamily mistral();
ModelFamily qwen2();
ModelFamily qwen3();
ModelFamily qwen3_moe();
ModelFamily gemma3_text();
ModelFamily qwen2_5_vl();
ModelFamily qwen3_vl();
ModelFamily qwen3_vl_moe();

const std::vector<ModelFamily>& model_families() {
  static const std::vector<ModelFamily> families = {llama(),       mistral(),    qwen2(),    qwen3(),       qwen3_moe(),
                                                    gemma3_text(), qwen2_5_vl(), qwen3_vl(), qwen3_vl_moe()};
  return families;
}

const ModelFamily* find_family(const std::string& model_type) {
  const auto& families = model_families();
  const auto found = std::find_if(families.begin(), families.end(),
                                  [&](const ModelFamily& family) { return family.model_type == model_type; });
  return found == families.end() ? nullptr : &*found;
}

const ModelFamily& family_of(const HfConfig& config) {
  const auto type = config.need<std::string>("model_type");
  const auto* family = find_family(type);
  std::vector<std::string> names;
  for (const auto& each : model_families()) names.push_back(each.model_type);
  TORCH_CHECK(family != nullptr, config.path(), ": model_type ", type,
              " is not supported; known are: ", c10::Join(", ", names));
  return *family;
}

const ModelFamily& family_of(const std::filesystem::path& hf_dir) {
  const auto config = need_model_config(hf_dir.string());
  return family_of(HfConfig(config, (hf_dir / "config.json").string()));
}

DecoderConfig decoder_config_from_hf(const HfConfig& config) { return family_of(config).read(config); }

Network network_from_hf(const HfConfig& config) {
  return decoder_network(decoder_config_from_hf(config), family_of(config).layer);
}

DecoderConfig decoder_config_from_hf(const nlohmann::ordered_json& config_json, const std::string& path) {
  return decoder_config_from_hf(HfConfig(config_json, path));
}

DecoderConfig decoder_config_from_hf(const std::filesystem::path& hf_dir) {
  return decoder_config_from_hf(need_model_config(hf_dir.string()), (hf_dir / "config.json").string());
}

}  // namespace megashard
