#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace megashard::sim {

/// Default generator of a simulated device (-1: the current one). Draws the same numbers as a CPU generator with the
/// same seed.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

/// Scope in which the CPU's default generator has a device's state, for operators that draw from the default generator
/// without an argument.
class DrawsFromDevice {
 public:
  explicit DrawsFromDevice(int device);
  ~DrawsFromDevice();
  DrawsFromDevice(const DrawsFromDevice&) = delete;
  DrawsFromDevice& operator=(const DrawsFromDevice&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  at::Generator of_device_;
  at::Tensor cpu_state_;
};

/// CPU generator behind a device's generator.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace megashard::sim
