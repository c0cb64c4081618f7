#pragma once

#include <string>
#include <vector>

#include "models/config/decoder_config.h"
#include "models/config/weight_files.h"

namespace megashard {

/// Name, among a stack's modules, of the list with the layers of multi-token prediction; `transformer_layer` in each of
/// them is a LayerSpec's.
inline constexpr const char* kPredictionLayers = "mtp_layers";
inline constexpr const char* kTransformerLayer = "transformer_layer";

/// How files name the weights of a network's prediction layers. `stack`: path of the module with the layers, with its
/// dot.
std::vector<WeightRenaming> prediction_renamings(const DecoderConfig& config, const std::string& stack,
                                                 const WeightFiles& files);

/// True for a tensor of a prediction layer in the files.
bool is_of_prediction_layer(const DecoderConfig& config, const std::string& stack, const WeightFiles& files,
                            const std::string& stored);

/// The key of config.json with the number of prediction layers. Null if the family's files have none that can be
/// trained.
const char* prediction_depth_key(const WeightFiles& files);

}  // namespace megashard
