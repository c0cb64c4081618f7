#pragma once

namespace megashard {

struct CopyTable;
struct Float8Quantise;
struct Float8Dequantise;
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;

/// Kernels of libmegashard_cuda.so; asynchronous on the current stream of the current device.
struct CudaKernels {
  void (*copy)(const CopyTable& table);
  void (*quantise)(const Float8Quantise& quantise);
  void (*dequantise)(const Float8Dequantise& dequantise);
  void (*adamw)(const AdamWTable& table);
  void (*squares)(const SquaresTable& table);
  void (*squares_total)(const SquaresTotal& of);
};

/// Loads the module on the first call; see cuda_module.h.
const CudaKernels& cuda_kernels();

}  // namespace megashard
