#pragma once

#include "parallel/cuda_kernels.h"

namespace megashard {

CudaKernels kernels_of_module();

}  // namespace megashard
