#include "parallel/cuda/kernels.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "parallel/cuda/launches.h"

namespace megashard {
namespace {

template <class Launch, void (*kLaunch)(const Launch&, cudaStream_t)>
void on_current_stream(const Launch& launch) {
  kLaunch(launch, c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

CudaKernels kernels_of_module() {
  return {.copy = on_current_stream<CopyTable, launch_copy>,
          .quantise = on_current_stream<Float8Quantise, launch_quantise>,
          .dequantise = on_current_stream<Float8Dequantise, launch_dequantise>,
          .adamw = on_current_stream<AdamWTable, launch_adamw>,
          .squares = on_current_stream<SquaresTable, launch_squares>,
          .squares_total = on_current_stream<SquaresTotal, launch_squares_total>};
}

}  // namespace megashard
