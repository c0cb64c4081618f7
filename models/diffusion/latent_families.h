#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/diffusion/latent_model.h"

namespace megashard {

struct HunyuanVideoConfig;
struct WanConfig;

/// A class of diffusers that predicts latents.
struct LatentFamily {
  std::string class_name;  ///< `_class_name` of config.json
  /// Reads config.json. Throws for unsupported settings.
  std::shared_ptr<LatentModel> (*make)(const HfConfig& config);
};

const std::vector<LatentFamily>& latent_families();
/// The family of a config.json by its `_class_name`; null if it is of no model of latents.
const LatentFamily* latent_family_of(const nlohmann::ordered_json& config);
/// The patches of config.json's model; unset if it is of no model of latents.
std::optional<LatentPatches> latent_patches_of(const HfConfig& config);
/// Throws for settings of config.json that the family does not support.
void check_settings(const LatentFamily& family, const HfConfig& config);

/// diffusers' WanTransformer3DModel and WanVACETransformer3DModel.
std::shared_ptr<LatentModel> make_wan(const WanConfig& config);
/// diffusers' FluxTransformer2DModel (Flux.1). Reads config.json. Throws for unsupported settings.
std::shared_ptr<LatentModel> make_flux(const HfConfig& config);
/// diffusers' QwenImageTransformer2DModel. Reads config.json. Throws for unsupported settings.
std::shared_ptr<LatentModel> make_qwen_image(const HfConfig& config);
/// diffusers' HunyuanVideo15Transformer3DModel.
std::shared_ptr<LatentModel> make_hunyuan_video(const HunyuanVideoConfig& config);
/// diffusers' LTX2VideoTransformer3DModel (LTX-2). Reads config.json. Throws for unsupported settings.
std::shared_ptr<LatentModel> make_ltx2(const HfConfig& config);

/// Throws unless the channels that turn by each axis add up to a head.
void require_axes(const HfConfig& config, const std::vector<int64_t>& axes, int64_t head_dim);
/// Throws and names a key of config.json that is none of these, and does not begin with "_".
void require_known_keys(const HfConfig& config, const std::set<std::string>& known);

}  // namespace megashard
