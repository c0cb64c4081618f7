#include "models/network/prediction_files.h"

#include <charconv>
#include <utility>

namespace megashard {
namespace {

using Place = WeightFiles::PredictionLayers;

/// Modules of a PredictionLayer, and their names in the files.
using Names = std::vector<std::pair<std::string, std::string>>;

Names names_behind_last(const std::string& layer) {
  return {{"enorm.", layer + "enorm."},
          {"hnorm.", layer + "hnorm."},
          {"eh_proj.", layer + "eh_proj."},
          {"final_layernorm.", layer + "shared_head.norm."},
          {std::string(kTransformerLayer) + ".", layer}};
}

Names names_of_mtp() {
  return {{"enorm.", "mtp.pre_fc_norm_embedding."},
          {"hnorm.", "mtp.pre_fc_norm_hidden."},
          {"eh_proj.", "mtp.fc."},
          {"final_layernorm.", "mtp.norm."},
          {std::string(kTransformerLayer) + ".", "mtp.layers.0."}};
}

}  // namespace

std::vector<WeightRenaming> prediction_renamings(const DecoderConfig& config, const std::string& stack,
                                                 const WeightFiles& files) {
  std::vector<WeightRenaming> renamings;
  for (int64_t k = 0; k < config.prediction.depth; ++k) {
    Names names;
    if (files.prediction_layers == Place::kBehindLast)
      names = names_behind_last(stack + "layers." + std::to_string(config.num_layers + k) + ".");
    if (files.prediction_layers == Place::kMtp && k == 0) names = names_of_mtp();
    const auto ours = stack + kPredictionLayers + "." + std::to_string(k) + ".";
    for (auto& [module, stored] : names) renamings.push_back({ours + module, std::move(stored)});
  }
  return renamings;
}

bool is_of_prediction_layer(const DecoderConfig& config, const std::string& stack, const WeightFiles& files,
                            const std::string& stored) {
  if (files.prediction_layers == Place::kMtp || files.prediction_layers == Place::kOtherMtp)
    return stored.starts_with("mtp.");
  const auto layers = stack + "layers.";
  if (files.prediction_layers != Place::kBehindLast || !stored.starts_with(layers)) return false;
  int64_t layer = -1;
  std::from_chars(stored.data() + layers.size(), stored.data() + stored.size(), layer);
  return layer >= config.num_layers;
}

const char* prediction_depth_key(const WeightFiles& files) {
  switch (files.prediction_layers) {
    case Place::kBehindLast:
      return "num_nextn_predict_layers";
    case Place::kMtp:
      return "mtp_num_hidden_layers";
    case Place::kNone:
    case Place::kOtherMtp:
      break;
  }
  return nullptr;
}

}  // namespace megashard
