#include "models/layers/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/zeros.h>

namespace megashard {

Norm::Norm(const DecoderConfig& config, int64_t width, NormInput input)
    : class_name_(config.names.norm),
      input_(input),
      ranks_(config.tensor_parallel),
      kind_(config.norm),
      zero_centered_(config.zero_centered_norm),
      eps_(config.norm_eps) {
  weight = register_parameter("weight", at::full({width}, zero_centered_ ? 0.0 : 1.0));
  if (kind_ == NormKind::kLayerNorm) bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor Norm::shared(const at::Tensor& parameter) const {
  if (!parameter.defined()) return parameter;
  switch (input_) {
    case NormInput::kHidden:
      return ranks_->for_own_rows(parameter);
    case NormInput::kHeads:
      break;
  }
  return ranks_->with_summed_gradient(parameter);
}

at::Tensor Norm::forward(const at::Tensor& x) {
  const auto normed = [this](const at::Tensor& rows, const at::Tensor& factor, const at::Tensor& shift) {
    if (kind_ == NormKind::kRmsNorm) return rms_norm(rows, factor, eps_);
    return at::layer_norm(rows, {rows.size(-1)}, factor, shift, eps_);
  };
  const auto factor = shared(weight), shift = shared(bias);
  if (!zero_centered_) return normed(x, factor, shift);
  return normed(x.to(at::kFloat), factor.to(at::kFloat) + 1, shift.defined() ? shift.to(at::kFloat) : shift)
      .to(x.scalar_type());
}

NormedSum Norm::forward_sum(const at::Tensor& residual, const at::Tensor& branch) {
  if (kind_ == NormKind::kRmsNorm && !zero_centered_) return add_rms_norm(residual, branch, shared(weight), eps_);
  const auto sum = residual + branch;
  return {sum, forward(sum)};
}

at::Tensor Norm::forward_rotated(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  if (kind_ != NormKind::kRmsNorm) return rotate(forward(heads), cos, sin);
  return norm_and_rotate(heads, {.weight = shared(weight), .eps = eps_, .zero_centered = zero_centered_}, cos, sin);
}

void Norm::init_own_weights(const WeightInit& /*init*/) {
  weight.fill_(zero_centered_ ? 0 : 1);
  if (bias.defined()) bias.zero_();
}

}  // namespace megashard
