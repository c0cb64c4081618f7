#pragma once

#include "models/kernels/gpu/row_threads.h"

/// Rotary embedding of heads, with the formulas of row_kernels.inc.
namespace megashard::gpu {

/// Strides of heads [batch, length, heads, head_dim], in elements; the last dimension is contiguous.
struct HeadStrides {
  int64_t batch;
  int64_t time;
  int64_t head;
};

/// x and y [batch, length, heads, head_dim], with a contiguous last dimension; y may be x. cos, sin [length or batch *
/// length, half].
struct RotaryTokens {
  const void* x;
  const void* cos;
  const void* sin;
  void* y;
  int64_t batch;
  int64_t length;
  HeadStrides of_x;
  HeadStrides of_y;
  int32_t heads;
  int32_t head_dim;
  int32_t half;  ///< rotates channels i and half + i, for i < half; those from 2 half on are unchanged
  bool table_per_batch;
  bool back;  ///< rotates by the opposite angle
  FloatFormat format;
  bool vectors;  ///< halves of heads and rows of tables are aligned to 16 bytes
};

/// A thread's piece: a vector of each half of a head, or one of the unrotated rest.
constexpr int rotary_pieces_of_head(const RotaryTokens& launch) {
  const int vector = launch.vectors ? static_cast<int>(16 / size_of(launch.format)) : 1;
  return (launch.head_dim - launch.half) / vector;
}

/// Threads per block, which processes one token.
constexpr int rotary_threads(const RotaryTokens& launch) {
  const int64_t pieces = int64_t{launch.heads} * rotary_pieces_of_head(launch);
  return pieces >= kBlock ? kBlock : static_cast<int>((pieces + kWarp - 1) / kWarp * kWarp);
}

template <class T, int kVector>
constexpr void rotate_token(const RotaryTokens& launch, int64_t token, int thread, int threads) {
  const int64_t time = token % launch.length, row = token / launch.length;
  const T* x = static_cast<const T*>(launch.x) + row * launch.of_x.batch + time * launch.of_x.time;
  T* y = static_cast<T*>(launch.y) + row * launch.of_y.batch + time * launch.of_y.time;
  const int64_t angles = (launch.table_per_batch ? token : time) * launch.half;
  const int pieces = (launch.head_dim - launch.half) / kVector;
  for (int piece = thread; piece < launch.heads * pieces; piece += threads) {
    const int head = piece / pieces, place = piece % pieces * kVector;
    const T* from = x + head * launch.of_x.head;
    T* to = y + head * launch.of_y.head;
    if (place >= launch.half) {
      store(to + launch.half + place, load<T, kVector>(from + launch.half + place));
      continue;
    }
    const auto first = load<T, kVector>(from + place), second = load<T, kVector>(from + launch.half + place);
    const auto cos = load<T, kVector>(static_cast<const T*>(launch.cos) + angles + place);
    const auto sin = load<T, kVector>(static_cast<const T*>(launch.sin) + angles + place);
    Vector<T, kVector> of_first{}, of_second{};
    for (int k = 0; k < kVector; ++k) {
      const float a = widened(first.values[k]), b = widened(second.values[k]);
      const float c = widened(cos.values[k]), s = launch.back ? -widened(sin.values[k]) : widened(sin.values[k]);
      of_first.values[k] = narrowed<T>(a * c - b * s);
      of_second.values[k] = narrowed<T>(b * c + a * s);
    }
    store(to + place, of_first);
    store(to + launch.half + place, of_second);
  }
}

constexpr Traffic traffic_of(const RotaryTokens& launch) {
  const int64_t tokens = launch.batch * launch.length, size = size_of(launch.format);
  const int64_t of_heads = 2 * tokens * launch.heads * launch.head_dim * size;
  const int64_t tables = 2 * (launch.table_per_batch ? tokens : launch.length) * launch.half * size;
  const int64_t of_tables = 2 * tokens * launch.heads * launch.half * size;
  return {.moved = of_heads + of_tables, .again = of_tables - tables, .least = of_heads + tables};
}

}  // namespace megashard::gpu
