#pragma once

#include "parallel/device/cuda_module.h"

namespace megashard {

CudaKernels kernels_of_module();

}  // namespace megashard
