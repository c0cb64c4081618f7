#include "models/layers/norm.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "models/kernels/fused_ops.h"

namespace megashard {

Norm::Norm(const DecoderConfig& config, int64_t width)
    : class_name_(config.names.norm), kind_(config.norm), eps_(config.norm_eps) {
  weight = register_parameter("weight", at::ones({width}));
  if (kind_ == NormKind::kLayerNorm) bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor Norm::forward(const at::Tensor& x) {
  if (kind_ == NormKind::kRmsNorm) return rms_norm(x, weight, eps_);
  return at::layer_norm(x, {x.size(-1)}, weight, bias, eps_);
}

}  // namespace megashard
