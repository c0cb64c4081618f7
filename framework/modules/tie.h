#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace megashard {

/// Makes a parameter of `module` the very tensor `shared`, in its member and in its registration:
///   tie_parameter(*head, head->weight, embedding->weight);
/// (`head->weight = embedding->weight` alone leaves the old tensor registered: it would be trained,
/// saved, and unused.) Sizes must agree. Call it in the model's constructor, before fully_shard and
/// before an optimizer is made. Not called `tie`: a module's base would bring std::tie in, which
/// takes anything and does nothing.
void tie_parameter(torch::nn::Module& module, at::Tensor& member, const at::Tensor& shared);

}  // namespace megashard
