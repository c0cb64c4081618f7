#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace megashard::sim {

/// The generator of a simulated device by default (-1: of the current one). Its numbers are those
/// of a CPU generator of the same seed.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

/// While it lives, the CPU's default generator continues where a device's is: for operators that
/// draw from the default one without being given any.
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

/// The CPU generator that draws for it.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace megashard::sim
