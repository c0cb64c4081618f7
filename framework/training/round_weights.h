#pragma once

#include <torch/nn/module.h>

namespace megashard {

/// Every fp32 parameter takes the nearest values of bf16 and stays fp32 (--downcast-to-bf16).
void round_weights_to_bf16(const torch::nn::Module& model);

}  // namespace megashard
