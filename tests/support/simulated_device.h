#pragma once

#include <ATen/core/Generator.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "parallel/device/cuda_module.h"
#include "parallel/sim/sim_module.h"

namespace megashard::testing {

/// Whether this program runs its tests on the simulated CUDA device (MEGASHARD_TEST_DEVICE=sim).
bool on_simulated_device();

/// Loads the simulated device, takes it for what tests make, and lets each test fail by what it
/// finds. Called by main.
void run_on_simulated_device();

/// Only where on_simulated_device().
const CudaModule& simulated_cuda();
const sim::SimModule& simulated_device();

/// Where tests make their tensors: the simulated device, or the CPU.
c10::Device device_of_tests();

/// A generator of its own, of that device (of the thread's current one).
at::Generator generator_of_tests(uint64_t seed);

}  // namespace megashard::testing

/// For a test of what only a CPU has, or that reads tensors through pointers.
#define MEGASHARD_NOT_ON_SIM(why) \
  if (megashard::testing::on_simulated_device()) GTEST_SKIP() << "not run on the simulated device: " why

/// For a test of what only a device has, with the counts and reports of the simulated one.
#define MEGASHARD_SIM_ONLY() \
  if (!megashard::testing::on_simulated_device()) GTEST_SKIP() << "not run: MEGASHARD_TEST_DEVICE is not sim"
