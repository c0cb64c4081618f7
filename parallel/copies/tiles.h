#pragma once

#include <cstdint>

/// Shared by launches over a table of pieces: a piece is split into tiles, one per block. Compiled by nvcc and by the
/// host's compiler.
namespace megashard {

/// Values loaded or stored at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  T values[kCount];
};

/// Index of the piece that contains tile `tile`. A piece has at least one tile; its tiles start at first_tile, after
/// those of earlier pieces.
template <class Piece>
constexpr int piece_of_tile(const Piece* pieces, int count, int64_t tile) {
  int first = 0;
  for (int past = count; past - first > 1;) {
    const int middle = (first + past) / 2;
    (pieces[middle].first_tile <= tile ? first : past) = middle;
  }
  return first;
}

}  // namespace megashard
