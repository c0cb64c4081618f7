#pragma once

#include <string>

#include "models/layers/norm.h"
#include "models/moe/router.h"

namespace megashard {

/// Gemma 4's router (transformers' Gemma4TextRouter): logits proj(norm(x) * scale / sqrt(C)), a softmax in fp32, the K
/// largest normalised to sum 1, each times its expert's per_expert_scale. Weights are fp32. `norm`: without a weight.
RouterSpecPtr normed_router(std::string class_name, NormSpec norm);

}  // namespace megashard
