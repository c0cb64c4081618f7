#pragma once

#include <ATen/core/Generator.h>

namespace megashard::sim {

/// The generator of a simulated device by default (-1: of the current one). Its numbers are those
/// of a CPU generator of the same seed.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

/// The CPU generator that draws for it.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace megashard::sim
