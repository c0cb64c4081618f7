#pragma once

#include <torch/nn/module.h>

#include <string>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// "layers.0.weight holds NaN or infinity", "a, b, c and 4 more hold NaN or infinity", or nothing:
/// of the parameters, whichever rank has their rows. Collective.
std::string weights_without_numbers(const torch::nn::Module& model, const ProcessGroupPtr& group);

}  // namespace megashard
