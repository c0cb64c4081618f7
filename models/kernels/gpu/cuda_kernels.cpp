// Part of libmegashard_cuda.so.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "models/kernels/gpu/launches.h"

namespace megashard::gpu {
namespace {

template <class Launch, void (*kLaunch)(const Launch&, cudaStream_t)>
void on_current_stream(const Launch& launch) {
  kLaunch(launch, c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// LibTorch has grouped products for Hopper and Blackwell.
bool has_grouped_products() {
  static const bool has = [] {
    int device = 0, major = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9 || major == 10;
  }();
  return has;
}

[[maybe_unused]] const bool set = [] {
  set_gpu_kernels({.rms_norm = on_current_stream<RmsNormRows, launch_rms_norm>,
                   .rms_norm_grad = on_current_stream<RmsNormGradRows, launch_rms_norm_grad>,
                   .head_norm = on_current_stream<HeadNormRows, launch_head_norm>,
                   .head_norm_grad = on_current_stream<HeadNormGradRows, launch_head_norm_grad>,
                   .swiglu = on_current_stream<SwigluElements, launch_swiglu>,
                   .swiglu_grad = on_current_stream<SwigluGradElements, launch_swiglu_grad>,
                   .rotate = on_current_stream<RotaryTokens, launch_rotate>,
                   .cross_entropy = on_current_stream<CrossEntropyRows, launch_cross_entropy>,
                   .cross_entropy_grad = on_current_stream<CrossEntropyGradRows, launch_cross_entropy_grad>,
                   .has_grouped_products = has_grouped_products});
  return true;
}();

}  // namespace
}  // namespace megashard::gpu
