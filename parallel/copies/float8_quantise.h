#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

enum class Float8Scale {
  kAmax,        ///< the largest magnitude becomes 448, the largest number of the format
  kPowerOfTwo,  ///< the next power of two: numbers keep their digits but for rounding
  kRowAmax,     ///< as kAmax, for each row of a matrix
};

// float8_e4m3fn with a scale for many numbers: value = fp8 * scale. Kernels on CUDA, on the current
// stream and without waiting for the device; loops of the same arithmetic, bit for bit, on CPUs.
// With an infinity or a NaN among them, all numbers of a scale become NaN.

/// rows: contiguous fp32, fp64, bf16 or fp16; payload: [n] float8_e4m3fn, n >= rows.numel(), zero
/// after the rows; scales: [m] fp32, contiguous, each of n / m numbers one after the other.
void quantise_float8(const at::Tensor& rows, const at::Tensor& payload, const at::Tensor& scales,
                     Float8Scale kind = Float8Scale::kAmax);

/// payloads: [ranks, n] float8_e4m3fn, scales: [ranks, m] fp32, both strided over ranks; whole:
/// contiguous, fp32, fp64, bf16 or fp16, cut along `dim` into chunks of which the first has
/// chunk_size of its rows. A payload holds its rank's chunk.
void dequantise_float8(const at::Tensor& payloads, const at::Tensor& scales, int64_t dim, int64_t chunk_size,
                       const at::Tensor& whole);

}  // namespace megashard
