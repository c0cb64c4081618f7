#include "models/layers/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace megashard {

Norm::Norm(NormSpec spec, TensorParallelRanksPtr ranks, NormInput input)
    : spec_(std::move(spec)), ranks_(std::move(ranks)), input_(input) {
  if (spec_.weight) weight = register_parameter("weight", at::full({spec_.width}, spec_.zero_centered ? 0.0 : 1.0));
  if (spec_.kind == NormKind::kLayerNorm && spec_.bias) bias = register_parameter("bias", at::zeros({spec_.width}));
}

at::Tensor Norm::factor(const at::Tensor& x) const {
  return weight.defined() ? shared(weight) : at::ones({spec_.width}, x.options());
}

at::Tensor Norm::shared(const at::Tensor& parameter) const {
  if (!parameter.defined() || ranks_ == nullptr) return parameter;
  switch (input_) {
    case NormInput::kHidden:
      return ranks_->for_own_rows(parameter);
    case NormInput::kHeads:
      break;
  }
  return ranks_->with_summed_gradient(parameter);
}

at::Tensor Norm::forward(const at::Tensor& x) {
  const auto normed = [this](const at::Tensor& rows, const at::Tensor& scale, const at::Tensor& shift) {
    if (spec_.groups > 1) {
      const auto parts = rows.unflatten(-1, {spec_.groups, -1});
      return rms_norm(parts, at::ones({parts.size(-1)}, scale.options()), spec_.eps).flatten(-2) * scale;
    }
    if (spec_.kind == NormKind::kRmsNorm) return rms_norm(rows, scale, spec_.eps);
    return at::layer_norm(rows, {rows.size(-1)}, scale, shift, spec_.eps);
  };
  const auto scale = factor(x), shift = shared(bias);
  if (!spec_.zero_centered && !spec_.in_fp32) return normed(x, scale, shift);
  const auto in_fp32 = [](const at::Tensor& each) { return each.defined() ? each.to(at::kFloat) : each; };
  const auto weights = spec_.zero_centered ? in_fp32(scale) + 1 : in_fp32(scale);
  return normed(in_fp32(x), weights, in_fp32(shift)).to(x.scalar_type());
}

NormedSum Norm::forward_sum(const at::Tensor& residual, const at::Tensor& branch) {
  if (spec_.kind == NormKind::kRmsNorm && !spec_.zero_centered && !spec_.in_fp32 && spec_.groups == 1)
    return add_rms_norm(residual, branch, factor(residual), spec_.eps);
  const auto sum = residual + branch;
  return {sum, forward(sum)};
}

at::Tensor Norm::forward_rotated(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  if (spec_.kind != NormKind::kRmsNorm) return rotate(forward(heads), cos, sin);
  return norm_and_rotate(heads, {.weight = factor(heads), .eps = spec_.eps, .zero_centered = spec_.zero_centered}, cos,
                         sin);
}

void Norm::init_own_weights(const WeightInit& /*init*/) {
  if (weight.defined()) weight.fill_(spec_.zero_centered ? 0 : 1);
  if (bias.defined()) bias.zero_();
}

std::shared_ptr<Hooked<Norm>> register_norm(torch::nn::Module& module, const std::optional<NamedNorm>& norm,
                                            const TensorParallelRanksPtr& ranks) {
  if (!norm) return nullptr;
  return module.register_module(norm->name, std::make_shared<Hooked<Norm>>(norm->norm, ranks));
}

}  // namespace megashard
