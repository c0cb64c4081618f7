#include "models/decoder/decoder_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>

#include <utility>

namespace megashard {
namespace {

/// hidden + branch, and the norm of the sum: in one pass if nothing else surrounds the norm's forward.
NormedSum normed_sum(const std::shared_ptr<Hooked<Norm>>& norm, const at::Tensor& hidden, const at::Tensor& branch) {
  if (norm != nullptr && norm->is_transparent()) return norm->forward_sum(hidden, branch);
  const auto sum = hidden + branch;
  return {sum, norm == nullptr ? sum : norm->forward(sum)};
}

}  // namespace

DecoderLayer::DecoderLayer(const LayerSpec& spec, const BuildContext& context)
    : class_name_(spec.class_name), dropout_(spec.dropout), scale_(spec.scale) {
  for (const auto& branch : spec.branches) {
    branches_.push_back({.part = branch.part->build(context), .before = {}, .after = {}, .parallel = branch.parallel});
    register_module(branch.name, branches_.back().part->module());
  }
  for (size_t i = 0; i < branches_.size(); ++i) {
    branches_[i].before = register_norm(*this, spec.branches[i].before, context.tensor_parallel);
    branches_[i].after = register_norm(*this, spec.branches[i].after, context.tensor_parallel);
  }
  if (spec.scalar) scalar_ = register_buffer("layer_scalar", at::ones({1}));
}

at::Tensor DecoderLayer::as_added(at::Tensor branch) const {
  if (is_training() && dropout_ > 0) branch = at::dropout(branch, dropout_, /*train=*/true);
  return scale_ == 1 ? branch : branch * scale_;
}

LayerOutput DecoderLayer::forward(const at::Tensor& hidden, const Pass& pass) {
  LayerOutput output{.hidden = hidden};
  at::Tensor branch, normed;  // output of the last part, not yet added, and its input
  for (const auto& each : branches_) {
    if (each.parallel) {
      output.hidden = output.hidden + branch;
    } else if (branch.defined()) {
      auto both = normed_sum(each.before, output.hidden, branch);
      output.hidden = std::move(both.sum);
      normed = std::move(both.normed);
    } else {
      normed = each.before ? each.before->forward(output.hidden) : output.hidden;
    }
    auto result = each.part->run(normed, pass);
    const bool shares = &each != &branches_.back() && (&each + 1)->parallel;
    if (!shares) normed.reset();
    if (result.balance.defined()) output.balance = std::move(result.balance);
    if (result.z.defined()) output.z = std::move(result.z);
    if (result.given.keys.defined()) output.given = std::move(result.given);
    branch = as_added(each.after ? each.after->forward(result.hidden) : result.hidden);
  }
  output.hidden = output.hidden + branch;
  if (scalar_.defined()) output.hidden = (output.hidden * scalar_).to(output.hidden.scalar_type());
  return output;
}

}  // namespace megashard
