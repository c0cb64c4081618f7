#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace megashard {

/// As tensor.normal_(mean, std, generator), with all of LibTorch's threads: same numbers and final generator state.
/// Returns false and does nothing if it is not faster (one thread, few numbers) or not possible (not contiguous fp32 on
/// a CPU).
bool normal_in_parts_(const at::Tensor& tensor, double mean, double std, at::Generator& generator);

}  // namespace megashard
