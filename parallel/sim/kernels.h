#pragma once

#include "parallel/device/cuda_module.h"

namespace megashard::sim {

/// The project's own kernels: a GPU's threads, run sequentially, as operations on the current stream.
CudaKernels kernels_of_module();

}  // namespace megashard::sim

namespace megashard {
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;
}  // namespace megashard

namespace megashard::sim {

// For kernels_of_module().
void adamw(const AdamWTable& asked);
void squares(const SquaresTable& asked);
void squares_total(const SquaresTotal& asked);

}  // namespace megashard::sim
