#pragma once

#include <memory>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/diffusion/latent_model.h"

namespace megashard {

/// diffusers' QwenImageTransformer2DModel. Reads config.json; throws for unsupported settings.
std::shared_ptr<LatentModel> make_qwen_image(const HfConfig& config);

}  // namespace megashard
