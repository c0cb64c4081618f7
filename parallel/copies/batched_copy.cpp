#include "parallel/copies/batched_copy.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "parallel/copies/copy_table.h"
#include "parallel/copies/element_copy.h"
#include "parallel/device/cuda_module.h"

namespace megashard {
namespace {

/// CPU twin of copy_kernel.
void copy_on_host(const RowsCopy& copy) {
  const auto from_bytes = static_cast<int64_t>(c10::elementSize(copy.from_dtype));
  const auto to_bytes = static_cast<int64_t>(c10::elementSize(copy.to_dtype));
  for (int64_t row = 0; row < copy.rows; ++row) {
    const auto* from = static_cast<const char*>(copy.from) + row * copy.from_stride * from_bytes;
    auto* to = static_cast<char*>(copy.to) + row * copy.to_stride * to_bytes;
    const int64_t count = std::clamp<int64_t>(copy.numel - row * copy.row_numel, 0, copy.row_numel);
    copy_elements(to, copy.to_dtype, from, copy.from_dtype, count);
    if (copy.zero_rest) std::memset(to + count * to_bytes, 0, (copy.row_numel - count) * to_bytes);
  }
}

bool aligned(const CopyTable::Piece& piece, int64_t from_bytes, int64_t to_bytes, int64_t alignment) {
  const auto fits = [alignment](const void* address, int64_t stride_bytes) {
    return reinterpret_cast<uintptr_t>(address) % alignment == 0 && stride_bytes % alignment == 0;
  };
  return fits(piece.from, piece.from_stride * from_bytes) && fits(piece.to, piece.to_stride * to_bytes);
}

CopyTable::Piece piece_of(const RowsCopy& copy) {
  const bool converts = copy.from_dtype != copy.to_dtype;
  const auto unit = converts ? 1 : static_cast<int64_t>(c10::elementSize(copy.from_dtype));
  const bool one_row = copy.rows == 1;
  CopyTable::Piece piece{.from = copy.from,
                         .to = copy.to,
                         .row_numel = copy.row_numel * unit,
                         .numel = copy.numel * unit,
                         .from_stride = one_row ? 0 : copy.from_stride * unit,
                         .to_stride = one_row ? 0 : copy.to_stride * unit,
                         .first_tile = 0,
                         .tiles_per_row = 0,
                         .from_format = FloatFormat::kFloat,
                         .to_format = FloatFormat::kFloat,
                         .vector = 1,
                         .converts = converts,
                         .zero_rest = copy.zero_rest};
  const int64_t tile = converts ? CopyTable::kTileNumel : CopyTable::kTileBytes;
  piece.tiles_per_row = static_cast<int32_t>((piece.row_numel + tile - 1) / tile);
  if (converts) {
    piece.from_format = float_format_of(copy.from_dtype);
    piece.to_format = float_format_of(copy.to_dtype);
    const auto from_bytes = static_cast<int64_t>(c10::elementSize(copy.from_dtype));
    const auto to_bytes = static_cast<int64_t>(c10::elementSize(copy.to_dtype));
    if (aligned(piece, from_bytes, to_bytes, 16)) piece.vector = 8;
  } else {
    for (const uint8_t bytes : {16, 4, 2}) {
      if (!aligned(piece, 1, 1, bytes)) continue;
      piece.vector = bytes;
      break;
    }
  }
  return piece;
}

}  // namespace

void make_copy_tables(std::span<const RowsCopy> copies, const std::function<void(const CopyTable&)>& launch) {
  CopyTable table;
  table.count = 0;
  table.tiles = 0;
  for (const RowsCopy& copy : copies) {
    if (copy.rows == 0 || copy.row_numel == 0 || (copy.numel == 0 && !copy.zero_rest)) continue;
    CopyTable::Piece& piece = table.pieces[table.count++];
    piece = piece_of(copy);
    piece.first_tile = table.tiles;
    table.tiles += copy.rows * piece.tiles_per_row;
    if (table.count < CopyTable::kCapacity) continue;
    launch(table);
    table.count = 0;
    table.tiles = 0;
  }
  if (table.count > 0) launch(table);
}

void copy_batch(std::span<const RowsCopy> copies, c10::Device device) {
  if (device.is_cpu()) {
    for (const RowsCopy& copy : copies) copy_on_host(copy);
    return;
  }
  const c10::DeviceGuard guard(device);  // for launches; backward may run on another thread
  make_copy_tables(copies, cuda_kernels().copy);
}

}  // namespace megashard
