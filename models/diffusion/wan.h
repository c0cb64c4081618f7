#pragma once

#include <memory>

#include "models/diffusion/latent_model.h"
#include "models/diffusion/wan_config.h"

namespace megashard {

/// diffusers' WanTransformer3DModel: patch_embedding, condition_embedder, blocks, proj_out.
std::shared_ptr<LatentModel> make_wan(const WanConfig& config);

}  // namespace megashard
