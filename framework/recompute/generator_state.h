#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace megashard {

/// The generator's state as a byte tensor, read under its lock.
at::Tensor generator_state(const at::Generator& generator);
void set_generator_state(at::Generator& generator, const at::Tensor& state);
bool same_generator_state(const at::Tensor& a, const at::Tensor& b);

}  // namespace megashard
