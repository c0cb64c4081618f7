#pragma once

#include <cstdint>

#include "parallel/copies/float_formats.h"
#include "parallel/copies/tiles.h"
#include "parallel/copies/traffic.h"
#include "parallel/updates/plain_memory.h"

/// Arguments of one launch that sums squares of many arrays in fp64, one sum per tile, and the code of its threads.
/// Compiled by nvcc for the kernel and by the host's compiler for the simulated device and for tests.
namespace megashard {

struct SquaresPiece {
  const void* values;
  int64_t numel;
  int32_t first_tile;
  FloatFormat format;
  bool vectors;  ///< the values are aligned for 4-element access
};

/// Fits the 32,764 bytes of kernel parameters allowed since CUDA 12.1.
struct SquaresTable {
  static constexpr int kCapacity = 1364;
  static constexpr int kThreads = 256;
  static constexpr int kVector = 4;
  static constexpr int64_t kTileNumel = int64_t{16} * kVector * kThreads;

  SquaresPiece pieces[kCapacity];
  double* sums;  ///< one per tile
  int32_t count;
  int32_t tiles;
};
static_assert(sizeof(SquaresTable) <= 32764);

/// Sum of `count` numbers by one block, in an order that depends on `count` only.
struct SquaresTotal {
  const double* sums;
  double* total;
  int64_t count;
};

/// Partial sum of thread `thread` in block `tile`.
template <class Memory = PlainMemory>
constexpr double squares_of_thread(const SquaresTable& table, int64_t tile, int thread) {
  constexpr int kVector = SquaresTable::kVector;
  const SquaresPiece& piece = table.pieces[piece_of_tile(table.pieces, table.count, tile)];
  const int64_t begin = (tile - piece.first_tile) * SquaresTable::kTileNumel;
  const int64_t end = begin + SquaresTable::kTileNumel < piece.numel ? begin + SquaresTable::kTileNumel : piece.numel;
  const int64_t whole_vectors = piece.vectors ? begin + (end - begin) / kVector * kVector : begin;
  double sum = 0;
  for (int64_t i = begin + thread * kVector; i < whole_vectors; i += int64_t{kVector} * SquaresTable::kThreads) {
    const auto values = Memory::template load<double, kVector>(piece.values, piece.format, i);
    for (int k = 0; k < kVector; ++k) sum += values.values[k] * values.values[k];
  }
  for (int64_t i = whole_vectors + thread; i < end; i += SquaresTable::kThreads) {
    const double value = Memory::template load<double, 1>(piece.values, piece.format, i).values[0];
    sum += value * value;
  }
  return sum;
}
constexpr double total_of_thread(const SquaresTotal& of, int thread) {
  double sum = 0;
  for (int64_t i = thread; i < of.count; i += SquaresTable::kThreads) sum += of.sums[i];
  return sum;
}

/// One step of a block's reduction: thread `thread` adds its partner's sum at this distance.
constexpr void add_partner(double* sums, int distance, int thread) {
  if (thread < distance) sums[thread] += sums[thread + distance];
}

constexpr Traffic traffic_of(const SquaresTable& table) {
  int64_t read = 0;
  for (int i = 0; i < table.count; ++i) read += table.pieces[i].numel * size_of(table.pieces[i].format);
  return {.moved = read + 8 * int64_t{table.tiles}, .again = 0, .least = read};
}

}  // namespace megashard
