#pragma once

#include "parallel/device/cuda_kernels.h"

namespace megashard::sim {

/// The project's own kernels: a GPU's threads, run sequentially, as operations on the current stream.
CudaKernels kernels_of_module();

}  // namespace megashard::sim
