#pragma once

#include "parallel/cuda/cuda_kernels.h"

namespace megashard {

CudaKernels kernels_of_module();

}  // namespace megashard
