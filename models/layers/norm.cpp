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
  const auto normed = [this](const at::Tensor& rows, const at::Tensor& factor, const at::Tensor& shift) {
    if (kind_ == NormKind::kRmsNorm) return rms_norm(rows, factor, eps_);
    return at::layer_norm(rows, {rows.size(-1)}, factor, shift, eps_);
  };
  if (!zero_centered_) return normed(x, weight, bias);
  const auto shift = bias.defined() ? bias.to(at::kFloat) : bias;
  return normed(x.to(at::kFloat), weight.to(at::kFloat) + 1, shift).to(x.scalar_type());
}

void Norm::init_own_weights(const WeightInit& /*init*/) {
  weight.fill_(zero_centered_ ? 0 : 1);
  if (bias.defined()) bias.zero_();
}

}  // namespace megashard
