#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/kernels/float8_linear.h"

namespace megashard {

/// The part of a model that computes in fp8, by patterns of MindSpeed's native route (module_patterns.h).
struct Float8Modules {
  std::vector<std::string> only{};     ///< layers, or modules around them; empty: all
  std::vector<std::string> ignored{};  ///< layers
  int64_t first = 0, last = 0;         ///< so many layers of the decoder are left out, from both ends
};

/// Makes the model's linear layers compute in fp8, except the output projection, adapters, and layers whose sizes are
/// not multiples of 16 (mxfp8: 32), as torchao's filters do. Attention, norms, embeddings and routers are unchanged.
/// Returns the number of layers; throws UsageError if there are none.
int64_t use_float8(torch::nn::Module& model, const Float8Options& options, const Float8Modules& modules = {});
/// The same in fp4 (float4_linear), of layers whose sizes are multiples of 16.
int64_t use_float4(torch::nn::Module& model, const Float8Modules& modules = {});

}  // namespace megashard
