#include "models/families/model_family.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "framework/mistakes.h"
#include "models/network/prediction_files.h"

namespace megashard {

namespace {

std::vector<ModelFamily>& registered_families() {
  static std::vector<ModelFamily> families;
  return families;
}

}  // namespace

RegisterFamily::RegisterFamily(ModelFamily family) {
  auto& all = registered_families();
  const auto place = std::ranges::lower_bound(all, family.model_type, {}, &ModelFamily::model_type);
  TORCH_CHECK(place == all.end() || place->model_type != family.model_type, "two families have the model_type ",
              family.model_type);
  all.insert(place, std::move(family));
}

const std::vector<ModelFamily>& model_families() { return registered_families(); }

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

WeightFiles weight_files_of(const HfConfig& config) {
  const auto& family = family_of(config);
  return family.files == nullptr ? family.weight_files : family.files(config);
}

bool is_classifier(const nlohmann::ordered_json& config) {
  const auto found = config.find("architectures");
  if (found == config.end() || !found->is_array() || found->empty() || !found->front().is_string()) return false;
  const auto name = found->front().get<std::string>();
  return name.ends_with("ForSequenceClassification") || name.ends_with("ForTokenClassification");
}

std::optional<std::string> classifier_of(const ModelFamily& family) {
  constexpr std::array<std::string_view, 12> kWithout{"cohere2",     "ernie4_5",    "gemma4_text", "glm4_moe",
                                                      "granite",     "kimi_linear", "lfm2",        "lfm2_moe",
                                                      "llama4_text", "minimax_m2",  "nemotron_h",  "qwen3_5_moe_text"};
  const std::string& type = family.model_type;
  if (family.encoder != nullptr || std::ranges::count(kWithout, type) > 0) return std::nullopt;
  if (type == "gemma3_text") return "Gemma3TextForSequenceClassification";
  if (type == "qwen3_5_text") return "Qwen3_5TextForSequenceClassification";
  constexpr std::string_view kHead = "ForCausalLM";
  return family.architecture.substr(0, family.architecture.size() - kHead.size()) + "ForSequenceClassification";
}

namespace {

/// How many layers of multi-token prediction a family's files can have.
int64_t most_predictions(const ModelFamily& family) {
  if (family.encoder != nullptr || prediction_depth_key(family.weight_files) == nullptr) return 0;
  return family.weight_files.prediction_layers == WeightFiles::PredictionLayers::kMtp
             ? 1
             : std::numeric_limits<int64_t>::max();
}

void check_predictions(const ModelFamily& family, int64_t depth) {
  const int64_t most = most_predictions(family);
  const std::string flag = "--mtp-num-layers " + std::to_string(depth) + ": ";
  require(depth == 0 || most > 0, flag + family.model_type +
                                      " has no layers of multi-token prediction that are known here "
                                      "(docs/models.md); leave it out");
  require(depth <= most, flag + "files of " + family.model_type + " have one layer of multi-token prediction; say 1");
}

}  // namespace

int64_t prediction_depth(const HfConfig& config, const ModelFamily& family) {
  const int64_t most = most_predictions(family);
  if (most == 0) return 0;
  return std::min(most, config.get_or_null<int64_t>(prediction_depth_key(family.weight_files), 0));
}

DecoderConfig decoder_config_from_hf(const HfConfig& config) { return family_of(config).read(config); }

Network network_from_hf(const HfConfig& config, const std::function<void(DecoderConfig&)>& change) {
  const auto& family = family_of(config);
  auto decoder = family.read(config);
  decoder.score_head = is_classifier(config.json());
  if (change) change(decoder);
  DescribeLayer layer = decoder_layer;
  if (family.layer != nullptr) {
    layer = [&](const DecoderConfig& common, int64_t index) { return family.layer(config, common, index); };
  }
  check_predictions(family, decoder.prediction.depth);
  auto network = decoder_network(std::move(decoder), layer);
  if (family.encoder != nullptr) network.encoder = family.encoder(config, network.config);
  return network;
}

}  // namespace megashard
