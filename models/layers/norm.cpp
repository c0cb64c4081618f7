#include "models/layers/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/zeros.h>

#include "models/kernels/fused_ops.h"

namespace megashard {

Norm::Norm(const DecoderConfig& config, int64_t width)
    : class_name_(config.names.norm),
      kind_(config.norm),
      zero_centered_(config.zero_centered_norm),
      eps_(config.norm_eps) {
  weight = register_parameter("weight", at::full({width}, zero_centered_ ? 0.0 : 1.0));
  if (kind_ == NormKind::kLayerNorm) bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor Norm::forward(const at::Tensor& x) {
  if (kind_ == NormKind::kLayerNorm)
    return at::layer_norm(x, {x.size(-1)}, zero_centered_ ? weight + 1 : weight, bias, eps_);
  if (!zero_centered_) return rms_norm(x, weight, eps_);
  return rms_norm(x.to(at::kFloat), weight.to(at::kFloat) + 1, eps_).to(x.scalar_type());
}

void Norm::init_own_weights(const WeightInit& /*init*/) {
  weight.fill_(zero_centered_ ? 0 : 1);
  if (bias.defined()) bias.zero_();
}

}  // namespace megashard
