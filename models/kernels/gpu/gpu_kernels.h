#pragma once

namespace megashard::gpu {

struct RmsNormRows;
struct RmsNormGradRows;
struct HeadNormRows;
struct HeadNormGradRows;
struct SwigluElements;
struct SwigluGradElements;
struct RotaryTokens;
struct CrossEntropyRows;
struct CrossEntropyGradRows;

/// Row kernels of a device, which run asynchronously on the current stream of the current device, and LibTorch's
/// capabilities on it.
struct GpuKernels {
  void (*rms_norm)(const RmsNormRows& launch);
  void (*rms_norm_grad)(const RmsNormGradRows& launch);
  void (*head_norm)(const HeadNormRows& launch);
  void (*head_norm_grad)(const HeadNormGradRows& launch);
  void (*swiglu)(const SwigluElements& launch);
  void (*swiglu_grad)(const SwigluGradElements& launch);
  void (*rotate)(const RotaryTokens& launch);
  void (*cross_entropy)(const CrossEntropyRows& launch);
  void (*cross_entropy_grad)(const CrossEntropyGradRows& launch);
  bool (*has_grouped_products)() = nullptr;  ///< at::_grouped_mm in bf16, without blocking the host; null on a CPU
};

/// Kernels of libmegashard_cuda.so or of the simulated device, which the first call loads (cuda_module.h).
const GpuKernels& gpu_kernels();
/// Called once by the module when it is loaded.
void set_gpu_kernels(const GpuKernels& kernels);

/// The same threads, run sequentially on the CPU and its memory. Throws for a label past the row.
const GpuKernels& host_kernels();

}  // namespace megashard::gpu
