#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace megashard {

/// tensor.normal_(mean, std, generator) by all of LibTorch's threads: the same numbers, and the generator ends where it
/// would. False, and nothing is done, where that does not pay (one thread, few numbers) or cannot be (other than
/// contiguous fp32 on a CPU).
bool normal_in_parts_(const at::Tensor& tensor, double mean, double std, at::Generator& generator);

}  // namespace megashard
