#include "framework/training/round_weights.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "parallel/fsdp/fully_shard.h"

namespace megashard {

void round_weights_to_bf16(const torch::nn::Module& model) {
  const c10::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters()) {
    at::Tensor local = reshard_and_view(parameter).local.detach();
    if (local.scalar_type() == at::kFloat) local.copy_(local.to(at::kBFloat16));
  }
}

}  // namespace megashard
