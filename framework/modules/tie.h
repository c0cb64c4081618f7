#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace megashard {

/// Replaces a parameter of `module` by the tensor `shared`, both the member and the registration:
///   tie_parameter(*head, head->weight, embedding->weight);
/// (`head->weight = embedding->weight` alone leaves the old tensor registered: it would be trained, saved, and unused.)
/// Sizes must be equal. Call it in the model's constructor, before fully_shard and before an optimizer is created. It
/// is not named `tie`, because argument-dependent lookup would find std::tie, which accepts anything and does nothing.
void tie_parameter(torch::nn::Module& module, at::Tensor& member, const at::Tensor& shared);

}  // namespace megashard
