#pragma once

#include <cstdint>

#include "parallel/copies/float_formats.h"
#include "parallel/copies/tiles.h"
#include "parallel/copies/traffic.h"

/// Arguments of one batched-copy launch, and the code of its threads. Compiled by nvcc for the kernel and by the host's
/// compiler for its test, which runs the threads sequentially.
namespace megashard {

/// Fits the 4 KiB of kernel parameters that every device allows.
struct CopyTable {
  static constexpr int kCapacity = 63;
  static constexpr int kThreads = 256;
  static constexpr int64_t kTileNumel = 8192;   // per row, with conversion: 4 vectors per thread
  static constexpr int64_t kTileBytes = 16384;  // per row, without conversion

  struct Piece {
    const void* from;
    void* to;
    int64_t row_numel;  // here and below: bytes if not converting
    int64_t numel;
    int64_t from_stride;
    int64_t to_stride;
    int64_t first_tile;  // index of the piece's first tile in the launch
    int32_t tiles_per_row;
    FloatFormat from_format;
    FloatFormat to_format;
    uint8_t vector;  // elements (or bytes) moved at once; converting: 8 or 1
    bool converts : 4;
    bool zero_rest : 4;
  };
  Piece pieces[kCapacity];
  int64_t tiles;
  int32_t count;
};
static_assert(sizeof(CopyTable) <= 4096);

/// Copies elements [begin, end) of one row; thread `thread` of kThreads.
template <class From, class To, int kVector>
constexpr void copy_part_of_row(const CopyTable::Piece& piece, int64_t row, int64_t begin, int64_t end, int thread) {
  const From* from = static_cast<const From*>(piece.from) + row * piece.from_stride;
  To* to = static_cast<To*>(piece.to) + row * piece.to_stride;
  const int64_t left = piece.numel - row * piece.row_numel;
  int64_t stop = left < end ? left : end;
  if (stop < begin) stop = begin;
  const int64_t whole_vectors = begin + (stop - begin) / kVector * kVector;
  for (int64_t i = begin + thread * kVector; i < whole_vectors; i += int64_t{CopyTable::kThreads} * kVector) {
    const auto in = *static_cast<const Vector<From, kVector>*>(static_cast<const void*>(from + i));
    Vector<To, kVector> out;
    for (int k = 0; k < kVector; ++k) {
      if constexpr (sizeof(From) == 1) {
        out.values[k] = in.values[k];
      } else {
        round_to(out.values[k], to_float(in.values[k]));
      }
    }
    *static_cast<Vector<To, kVector>*>(static_cast<void*>(to + i)) = out;
  }
  for (int64_t i = whole_vectors + thread; i < stop; i += CopyTable::kThreads) {
    if constexpr (sizeof(From) == 1) {
      to[i] = from[i];
    } else {
      round_to(to[i], to_float(from[i]));
    }
  }
  if (!piece.zero_rest) return;
  for (int64_t i = stop + thread; i < end; i += CopyTable::kThreads) to[i] = To{};
}

template <class From, class To>
constexpr void convert_part_of_row(const CopyTable::Piece& piece, int64_t row, int64_t begin, int64_t end, int thread) {
  if (piece.vector == 8) {
    copy_part_of_row<From, To, 8>(piece, row, begin, end, thread);
  } else {
    copy_part_of_row<From, To, 1>(piece, row, begin, end, thread);
  }
}

template <class From>
constexpr void convert_from(const CopyTable::Piece& piece, int64_t row, int64_t begin, int64_t end, int thread) {
  switch (piece.to_format) {
    case FloatFormat::kFloat:
      return convert_part_of_row<From, float>(piece, row, begin, end, thread);
    case FloatFormat::kDouble:
      return convert_part_of_row<From, double>(piece, row, begin, end, thread);
    case FloatFormat::kBFloat16:
      return convert_part_of_row<From, BFloat16Bits>(piece, row, begin, end, thread);
    case FloatFormat::kHalf:
      return convert_part_of_row<From, HalfBits>(piece, row, begin, end, thread);
  }
}

/// `Byte` is uint8_t.
template <class Byte>
constexpr void move_bytes(const CopyTable::Piece& piece, int64_t row, int64_t begin, int64_t end, int thread) {
  switch (piece.vector) {
    case 16:
      return copy_part_of_row<Byte, Byte, 16>(piece, row, begin, end, thread);
    case 4:
      return copy_part_of_row<Byte, Byte, 4>(piece, row, begin, end, thread);
    case 2:
      return copy_part_of_row<Byte, Byte, 2>(piece, row, begin, end, thread);
    default:
      return copy_part_of_row<Byte, Byte, 1>(piece, row, begin, end, thread);
  }
}

/// Body of thread `thread` in block `tile` of the launch.
constexpr void copy_tile(const CopyTable& table, int64_t tile, int thread) {
  const CopyTable::Piece& piece = table.pieces[piece_of_tile(table.pieces, table.count, tile)];
  const int64_t row = (tile - piece.first_tile) / piece.tiles_per_row;
  const int64_t place = (tile - piece.first_tile) % piece.tiles_per_row;
  const int64_t tile_numel = piece.converts ? CopyTable::kTileNumel : CopyTable::kTileBytes;
  const int64_t begin = place * tile_numel;
  const int64_t end = begin + tile_numel < piece.row_numel ? begin + tile_numel : piece.row_numel;
  if (!piece.converts) return move_bytes<uint8_t>(piece, row, begin, end, thread);
  switch (piece.from_format) {
    case FloatFormat::kFloat:
      return convert_from<float>(piece, row, begin, end, thread);
    case FloatFormat::kDouble:
      return convert_from<double>(piece, row, begin, end, thread);
    case FloatFormat::kBFloat16:
      return convert_from<BFloat16Bits>(piece, row, begin, end, thread);
    case FloatFormat::kHalf:
      return convert_from<HalfBits>(piece, row, begin, end, thread);
  }
}

constexpr Traffic traffic_of(const CopyTable& table) {
  int64_t bytes = 0;
  for (int i = 0; i < table.count; ++i) {
    const CopyTable::Piece& piece = table.pieces[i];
    const int64_t past = i + 1 < table.count ? table.pieces[i + 1].first_tile : table.tiles;
    const int64_t places = (past - piece.first_tile) / piece.tiles_per_row * piece.row_numel;
    const int64_t copied = piece.numel < places ? piece.numel : places;
    bytes += copied * (piece.converts ? size_of(piece.from_format) : 1);
    bytes += (piece.zero_rest ? places : copied) * (piece.converts ? size_of(piece.to_format) : 1);
  }
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard
