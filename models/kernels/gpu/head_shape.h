#pragma once

#include "models/kernels/gpu/rms_norm_rows.h"

/// Heads of tokens, one row each, normalised and rotated in one kernel, and their distribution over threads.
namespace megashard::gpu {

/// x [batch, length, heads, head_dim] with a contiguous last dimension; cos, sin [length or batch * length, half].
struct HeadShape {
  int64_t tokens;  ///< batch * length
  int64_t length;
  int64_t stride_batch;  ///< of x, elements
  int64_t stride_time;
  int64_t stride_head;
  int32_t heads;
  int32_t head_dim;  ///< at most 256
  int32_t half;      ///< rotates channels i and half + i, for i < half; those from 2 half on are unchanged
  bool table_per_batch;
  bool zero_centered;  ///< multiplies by 1 + weight and rounds once
  FloatFormat format;
  bool vectors;  ///< halves of heads and rows of tables are aligned to 16 bytes
};

constexpr int kHeadGroup = 8;  ///< threads per short head; longer ones use a warp

/// Items of a head per thread: a vector of each half, or one of the unrotated rest. 32 threads hold 256 channels.
template <int kVector>
constexpr int kHeldOfHead = 8 / kVector;

constexpr int head_items(const HeadShape& shape) {
  return (shape.head_dim - shape.half) / (shape.vectors ? static_cast<int>(16 / size_of(shape.format)) : 1);
}
constexpr int head_group(const HeadShape& shape) {
  const int held = !shape.vectors ? kHeldOfHead<1> : size_of(shape.format) == 4 ? kHeldOfHead<4> : kHeldOfHead<8>;
  return head_items(shape) <= kHeadGroup * held ? kHeadGroup : kWarp;
}
constexpr int64_t head_rows(const HeadShape& shape) { return shape.tokens * shape.heads; }

constexpr int64_t place_of_head(const HeadShape& shape, int64_t row) {
  const int64_t token = row / shape.heads;
  return token / shape.length * shape.stride_batch + token % shape.length * shape.stride_time +
         row % shape.heads * shape.stride_head;
}
constexpr int64_t angles_of_head(const HeadShape& shape, int64_t row) {
  const int64_t token = row / shape.heads;
  return (shape.table_per_batch ? token : token % shape.length) * shape.half;
}

/// Calls body(place, turns, i) for the items of thread `lane`: channels place and half + place, or only the latter.
template <int kGroup, int kVector, class Body>
constexpr void for_items(const HeadShape& shape, int lane, const Body& body) {
  const int items = (shape.head_dim - shape.half) / kVector;
  MEGASHARD_UNROLL
  for (int i = 0; i < kHeldOfHead<kVector>; ++i) {
    const int place = (lane + i * kGroup) * kVector;
    if (lane + i * kGroup < items) body(place, place < shape.half, i);
  }
}

/// Calls function(OfThreads<Threads<...>>) with the class for `launch`.
template <template <class T, int kVector, int kGroup> class Threads, class Launch, class Function>
void with_head_threads(const Launch& launch, const Function& function) {
  const auto of_vectors = [&]<class T, int kVector>(OfThreads<Vector<T, kVector>>) {
    if (head_group(launch.shape) == kHeadGroup) {
      function(OfThreads<Threads<T, kVector, kHeadGroup>>{});
    } else {
      function(OfThreads<Threads<T, kVector, kWarp>>{});
    }
  };
  with_row_format(launch.shape.format, [&](auto zero) {
    using T = decltype(zero);
    if (launch.shape.vectors) {
      of_vectors(OfThreads<Vector<T, kVectorOf<T>>>{});
    } else {
      of_vectors(OfThreads<Vector<T, 1>>{});
    }
  });
}

/// `arrays` like x, one number per row, weight and tables.
constexpr Traffic traffic_of_heads(const HeadShape& shape, int64_t arrays, int64_t weights) {
  const int64_t size = size_of(shape.format), rows = head_rows(shape), row = shape.head_dim * size;
  const int64_t table = 2 * shape.half * size;
  const int64_t tables = (shape.table_per_batch ? shape.tokens : shape.length) * table;
  const int64_t least = rows * (arrays * row + 4) + row + tables;
  const int64_t again = (rows * weights - 1) * row + rows * table - tables;
  return {.moved = least + again, .again = again, .least = least};
}

}  // namespace megashard::gpu
