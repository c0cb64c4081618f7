#pragma once

#include <torch/nn/module.h>

#include "models/kernels/float8_linear.h"

namespace megashard {

/// Lets the model's linear layers compute in fp8 but for the output projection, adapters, and layers whose sizes are
/// no multiples of 16 (mxfp8: 32), as torchao's filters do. Attention, norms, embeddings and routers stay as they are.
/// Returns the number of layers; none is a UsageError.
int64_t use_float8(torch::nn::Module& model, const Float8Options& options);

}  // namespace megashard
