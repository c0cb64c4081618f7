#pragma once

#include <memory>

#include "checkpoint/hugging_face/hf_config.h"
#include "models/diffusion/latent_model.h"

namespace megashard {

/// diffusers' FluxTransformer2DModel (Flux.1). Reads config.json; throws for unsupported settings.
std::shared_ptr<LatentModel> make_flux(const HfConfig& config);

}  // namespace megashard
