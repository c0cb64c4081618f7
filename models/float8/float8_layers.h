#pragma once

#include <torch/nn/module.h>

#include "models/kernels/float8_linear.h"

namespace megashard {

/// Makes the model's linear layers compute in fp8, except the output projection, adapters, and layers whose sizes are
/// not multiples of 16 (mxfp8: 32), as torchao's filters do. Attention, norms, embeddings and routers are unchanged.
/// Returns the number of layers; throws UsageError if there are none.
int64_t use_float8(torch::nn::Module& model, const Float8Options& options);

}  // namespace megashard
