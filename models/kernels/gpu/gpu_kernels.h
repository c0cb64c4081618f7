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

/// The row kernels of a device, which run on the current stream of the current device and return at once, and what it
/// has of LibTorch's.
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
  bool (*has_grouped_products)() = nullptr;  ///< at::_grouped_mm in bf16, without the host's waiting; null: on a CPU
};

/// Those of libmegashard_cuda.so or of the simulated device, which it loads at the first call (cuda_module.h).
const GpuKernels& gpu_kernels();
/// Called once by the module while it is loaded.
void set_gpu_kernels(const GpuKernels& kernels);

/// The same threads, one after the other, on the CPU and its memory. Throws at a label past the row.
const GpuKernels& host_kernels();

}  // namespace megashard::gpu
