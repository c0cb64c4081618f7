#pragma once

#include "parallel/device/cuda_kernels.h"

namespace megashard::sim {

/// The project's own kernels: what a GPU's threads do, one thread after the other, as operations on
/// the current stream.
CudaKernels kernels_of_module();

}  // namespace megashard::sim
