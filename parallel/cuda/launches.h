#pragma once

#include <cuda_runtime_api.h>

namespace megashard {

struct CopyTable;
struct Float8Quantise;
struct Float8Dequantise;
struct AdamWTable;
struct SquaresTable;
struct SquaresTotal;

// Kernel launches, compiled by nvcc, which sees no LibTorch header. Asynchronous; the caller checks for launch errors.
void launch_copy(const CopyTable& table, cudaStream_t stream);
void launch_quantise(const Float8Quantise& quantise, cudaStream_t stream);
void launch_dequantise(const Float8Dequantise& dequantise, cudaStream_t stream);
void launch_adamw(const AdamWTable& table, cudaStream_t stream);
void launch_squares(const SquaresTable& table, cudaStream_t stream);
void launch_squares_total(const SquaresTotal& of, cudaStream_t stream);

}  // namespace megashard
