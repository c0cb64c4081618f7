#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <span>

#include "parallel/copies/float_formats.h"

namespace megashard {

struct CopyTable;

/// Copy of strided rows between two buffers with dtype conversion; packs a tensor into a communication buffer rank by
/// rank, or unpacks it. Counts and strides are in elements of their own side.
struct RowsCopy {
  const void* from = nullptr;
  void* to = nullptr;
  at::ScalarType from_dtype = at::kByte;
  at::ScalarType to_dtype = at::kByte;
  int64_t rows = 1;
  int64_t row_numel = 0;
  int64_t numel = 0;  ///< total elements; row r has elements [r * row_numel, (r + 1) * row_numel) of them, so the last
                      ///< rows may have fewer or none
  int64_t from_stride = 0;
  int64_t to_stride = 0;
  bool zero_rest = false;  ///< zero-fills `to` if a row has fewer than row_numel elements
};

/// Runs all copies; they must not overlap. CUDA: asynchronous on the current stream, one kernel launch per
/// CopyTable::kCapacity copies; the buffers must stay until it has run. Converts between fp32, fp64, bf16 and fp16
/// only.
void copy_batch(std::span<const RowsCopy> copies, c10::Device device);

/// Calls `launch` with the tables of copy_batch's launches, in order.
void make_copy_tables(std::span<const RowsCopy> copies, const std::function<void(const CopyTable&)>& launch);

inline FloatFormat float_format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return FloatFormat::kFloat;
    case at::kDouble:
      return FloatFormat::kDouble;
    case at::kBFloat16:
      return FloatFormat::kBFloat16;
    case at::kHalf:
      return FloatFormat::kHalf;
    default:
      TORCH_CHECK(false, "cannot convert ", dtype, ": sharded parameters convert between floating dtypes only");
  }
}

}  // namespace megashard
