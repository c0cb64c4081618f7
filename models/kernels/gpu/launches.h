#pragma once

#include <cuda_runtime_api.h>

#include "models/kernels/gpu/gpu_kernels.h"

namespace megashard::gpu {

// Kernel launchers, compiled by nvcc, which includes no header of LibTorch. Asynchronous; the caller checks for launch
// errors.
void launch_rms_norm(const RmsNormRows& launch, cudaStream_t stream);
void launch_rms_norm_grad(const RmsNormGradRows& launch, cudaStream_t stream);
void launch_head_norm(const HeadNormRows& launch, cudaStream_t stream);
void launch_head_norm_grad(const HeadNormGradRows& launch, cudaStream_t stream);
void launch_swiglu(const SwigluElements& launch, cudaStream_t stream);
void launch_swiglu_grad(const SwigluGradElements& launch, cudaStream_t stream);
void launch_rotate(const RotaryTokens& launch, cudaStream_t stream);
void launch_cross_entropy(const CrossEntropyRows& launch, cudaStream_t stream);
void launch_cross_entropy_grad(const CrossEntropyGradRows& launch, cudaStream_t stream);

}  // namespace megashard::gpu
