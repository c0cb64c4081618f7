#pragma once

#include "parallel/cuda/cuda_module.h"
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

}  // namespace megashard::testing
