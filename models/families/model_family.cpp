#include "models/families/model_family.h"

#include <algorithm>
#include <utility>

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

DecoderConfig decoder_config_from_hf(const HfConfig& config) { return family_of(config).read(config); }

Network network_from_hf(const HfConfig& config, const std::function<void(DecoderConfig&)>& change) {
  const auto& family = family_of(config);
  auto decoder = family.read(config);
  if (change) change(decoder);
  DescribeLayer layer = decoder_layer;
  if (family.layer != nullptr) {
    layer = [&](const DecoderConfig& common, int64_t index) { return family.layer(config, common, index); };
  }
  auto network = decoder_network(std::move(decoder), layer);
  if (family.encoder != nullptr) network.encoder = family.encoder(config, network.config);
  return network;
}

}  // namespace megashard
