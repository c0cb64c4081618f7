#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <span>

namespace megashard {

struct CopyTable;

/// Rows that move from one buffer to another, strided on either side, and change their dtype on the
/// way: what packs a tensor rank by rank into a communication buffer, or takes it out of one.
/// Counts and strides are elements of the side they belong to.
struct RowsCopy {
  const void* from = nullptr;
  void* to = nullptr;
  at::ScalarType from_dtype = at::kByte;
  at::ScalarType to_dtype = at::kByte;
  int64_t rows = 1;
  int64_t row_numel = 0;
  int64_t numel = 0;  ///< row r has elements [r * row_numel, (r + 1) * row_numel) of these: the
                      ///< last rows may have fewer, or none
  int64_t from_stride = 0;
  int64_t to_stride = 0;
  bool zero_rest = false;  ///< zeros in `to` where a row has fewer elements than row_numel
};

/// Runs all copies, which must not overlap. CUDA: on the current stream, one kernel launch for up
/// to CopyTable::kCapacity of them, without waiting for the device; the buffers must stay until it
/// has run. dtypes differ between fp32, fp64, bf16 and fp16 only.
void copy_batch(std::span<const RowsCopy> copies, c10::Device device);

/// The launches that copy_batch makes of its copies, in order.
void make_copy_tables(std::span<const RowsCopy> copies, const std::function<void(const CopyTable&)>& launch);

}  // namespace megashard
