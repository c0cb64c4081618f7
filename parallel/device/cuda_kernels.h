#pragma once

namespace megashard {

struct CopyTable;
struct Float8Quantise;
struct Float8Dequantise;

/// The kernels of libmegashard_cuda.so. They run on the current stream of the current device and
/// return at once.
struct CudaKernels {
  void (*copy)(const CopyTable& table);
  void (*quantise)(const Float8Quantise& quantise);
  void (*dequantise)(const Float8Dequantise& dequantise);
};

/// Loads the module at the first call; see cuda_module.h.
const CudaKernels& cuda_kernels();

}  // namespace megashard
