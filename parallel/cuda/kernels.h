#pragma once

#include "parallel/device/cuda_kernels.h"

namespace megashard {

CudaKernels kernels_of_module();

}  // namespace megashard
