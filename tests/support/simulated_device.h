#pragma once

#include <ATen/core/Generator.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "parallel/device/cuda_module.h"
#include "parallel/sim/sim_module.h"

namespace megashard::testing {

/// True if this program runs its tests on the simulated CUDA device (MEGASHARD_TEST_DEVICE=sim).
bool on_simulated_device();

/// Loads the simulated device, makes it the default device of tests, and fails each test in which it finds an error.
/// main() calls it.
void run_on_simulated_device();

/// Only if on_simulated_device().
const CudaModule& simulated_cuda();
const sim::SimModule& simulated_device();

/// The device on which tests create tensors: the simulated device or the CPU.
c10::Device device_of_tests();

/// A new generator of device_of_tests() (of the thread's current device).
at::Generator generator_of_tests(uint64_t seed);

}  // namespace megashard::testing

/// For a test of a feature that only CPUs have, or that reads tensors through pointers.
#define MEGASHARD_NOT_ON_SIM(why) \
  if (megashard::testing::on_simulated_device()) GTEST_SKIP() << "not run on the simulated device: " why

/// For a test of a feature that only devices have; it uses the counts and reports of the simulated one.
#define MEGASHARD_SIM_ONLY() \
  if (!megashard::testing::on_simulated_device()) GTEST_SKIP() << "not run: MEGASHARD_TEST_DEVICE is not sim"
