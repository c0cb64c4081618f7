#pragma once

#include <cstdint>

/// What launches over a table of pieces have in common: a piece is cut into tiles, one for each block. Compiled by nvcc
/// and by the host's compiler.
namespace megashard {

/// Values that are loaded or stored at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  T values[kCount];
};

/// The piece of `count` that tile `tile` lies in. The tiles of a piece, at least one, follow those of the pieces before
/// it from its first_tile on.
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
