#include "models/diffusion/latent_families.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "framework/modules/deferred_init.h"
#include "models/diffusion/hunyuan_config.h"
#include "models/diffusion/wan_config.h"

namespace megashard {

const std::vector<LatentFamily>& latent_families() {
  static const std::vector<LatentFamily> families{
      {"WanTransformer3DModel", [](const HfConfig& config) { return make_wan(wan_config(config)); }},
      {"WanVACETransformer3DModel", [](const HfConfig& config) { return make_wan(wan_config(config)); }},
      {"FluxTransformer2DModel", make_flux},
      {"QwenImageTransformer2DModel", make_qwen_image},
      {"HunyuanVideo15Transformer3DModel",
       [](const HfConfig& config) { return make_hunyuan_video(hunyuan_video_config(config)); }},
      {"HunyuanVideo_1_5_DiffusionTransformer",
       [](const HfConfig& config) { return make_hunyuan_video(original_hunyuan_video_config(config)); }},
      {"LTX2VideoTransformer3DModel", make_ltx2},
      {"WanModel", [](const HfConfig& config) { return make_wan(original_wan_config(config)); }},
      {"VaceWanModel", [](const HfConfig& config) { return make_wan(original_wan_config(config)); }},
  };
  return families;
}

const LatentFamily* latent_family_of(const nlohmann::ordered_json& config) {
  const auto name = config.find("_class_name");
  if (name == config.end() || !name->is_string()) return nullptr;
  const auto found = std::ranges::find(latent_families(), name->get<std::string>(), &LatentFamily::class_name);
  return found == latent_families().end() ? nullptr : &*found;
}

std::optional<LatentPatches> latent_patches_of(const HfConfig& config) {
  const LatentFamily* family = latent_family_of(config.json());
  if (family == nullptr) return std::nullopt;
  InitTape tape;
  return tape.construct([&] { return family->make(config); })->latent_patches();
}

void check_settings(const LatentFamily& family, const HfConfig& config) {
  InitTape tape;
  tape.construct([&] { return family.make(config); });
}

void require_axes(const HfConfig& config, const std::vector<int64_t>& axes, int64_t head_dim) {
  const bool are_even = std::ranges::all_of(axes, [](int64_t axis) { return axis > 0 && axis % 2 == 0; });
  TORCH_CHECK(axes.size() == 3 && are_even && axes[0] + axes[1] + axes[2] == head_dim, config.path(),
              ": axes_dims_rope must be three even numbers whose sum is attention_head_dim, ", head_dim);
}

void require_known_keys(const HfConfig& config, const std::set<std::string>& known) {
  for (const auto& [key, value] : config.json().items()) {
    config.require_computed(key.starts_with("_") || known.contains(key), key,
                            " is no key of this class that is known here: take it out if it changes nothing");
  }
}

}  // namespace megashard
