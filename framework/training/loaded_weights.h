#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// All of its numbers; the host waits for the device.
bool is_finite(const at::Tensor& values);
/// Names in their order, the first few of them: "a, b, c and 4 more".
std::string first_names(const std::vector<std::string>& names);

/// "layers.0.weight holds NaN or infinity", "a, b, c and 4 more hold NaN or infinity", or nothing:
/// of the parameters, whichever rank has their rows. Collective.
std::string list_nonfinite_weights(const torch::nn::Module& model, const ProcessGroupPtr& group);

/// Every fp32 parameter takes the nearest values of bf16 and stays fp32 (--downcast-to-bf16).
void round_weights_to_bf16(const torch::nn::Module& model);

}  // namespace megashard
