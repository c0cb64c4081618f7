#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

enum class Float8Scale {
  kAmax,        ///< scales the largest magnitude to 448, the format's maximum
  kPowerOfTwo,  ///< next power of two: scaling only rounds to the format
  kRowAmax,     ///< kAmax for each row of a matrix
};

// float8_e4m3fn with one scale for many values: value = fp8 * scale. On CUDA, kernels on the current stream that do not
// block the host; on a CPU, bit-identical loops. Inf or NaN in one value turns all values of its scale into NaN.

/// rows: contiguous fp32, fp64, bf16 or fp16; payload: [n] float8_e4m3fn, n >= rows.numel(), zero-filled after the
/// rows; scales: [m] fp32, contiguous, each for n / m consecutive values.
void quantise_float8(const at::Tensor& rows, const at::Tensor& payload, const at::Tensor& scales,
                     Float8Scale kind = Float8Scale::kAmax);

/// payloads: [ranks, n] float8_e4m3fn, scales: [ranks, m] fp32, both strided over ranks; whole: contiguous fp32, fp64,
/// bf16 or fp16, sharded along `dim`, the first rank's chunk having chunk_size rows. Each payload holds its rank's
/// chunk.
void dequantise_float8(const at::Tensor& payloads, const at::Tensor& scales, int64_t dim, int64_t chunk_size,
                       const at::Tensor& whole);

}  // namespace megashard
