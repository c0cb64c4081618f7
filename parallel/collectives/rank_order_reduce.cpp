#include "parallel/collectives/rank_order_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace megashard {

namespace {

// Accumulated in the L1 cache; loops of this known length are vectorised at -O2 too.
constexpr int64_t kBlock = 1024;

template <typename T>
constexpr bool is_16_bit_float = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;

struct Sum {
  template <typename A>
  static A apply(A left, A right) {
    return static_cast<A>(left + right);
  }
};

// Both hand on a NaN, as PyTorch's max and min do.
struct Max {
  template <typename A>
  static A apply(A left, A right) {
    return (left > right || left != left) ? left : right;
  }
};

struct Min {
  template <typename A>
  static A apply(A left, A right) {
    return (left < right || left != left) ? left : right;
  }
};

template <typename T, typename Op, bool kWholeBlock>
void reduce_block(T* out, const std::vector<const void*>& sources, int64_t begin, int64_t length, bool average) {
  using Accumulator = std::conditional_t<is_16_bit_float<T>, float, T>;
  const int64_t count = kWholeBlock ? kBlock : length;
  Accumulator sums[kBlock];
  const T* first = static_cast<const T*>(sources[0]) + begin;
  for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Accumulator>(first[i]);
  for (size_t k = 1; k < sources.size(); ++k) {
    const T* next = static_cast<const T*>(sources[k]) + begin;
    for (int64_t i = 0; i < count; ++i) sums[i] = Op::apply(sums[i], static_cast<Accumulator>(next[i]));
  }
  if (average) {
    const auto parts = static_cast<Accumulator>(sources.size());
    for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<Accumulator>(sums[i] / parts);
  }
  for (int64_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(sums[i]);
}

template <typename T, typename Op>
void reduce_all(void* out, const std::vector<const void*>& sources, int64_t count, bool average) {
  T* typed_out = static_cast<T*>(out);
  int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    reduce_block<T, Op, true>(typed_out, sources, begin, kBlock, average);
  }
  if (begin < count) reduce_block<T, Op, false>(typed_out, sources, begin, count - begin, average);
}

template <typename T>
void reduce_as(void* out, const std::vector<const void*>& sources, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<T, Sum>(out, sources, count, false);
    case ReduceOp::kAvg:
      return reduce_all<T, Sum>(out, sources, count, true);
    case ReduceOp::kMax:
      return reduce_all<T, Max>(out, sources, count, false);
    case ReduceOp::kMin:
      return reduce_all<T, Min>(out, sources, count, false);
  }
}

}  // namespace

void reduce_in_rank_order(void* out, const std::vector<const void*>& sources, int64_t count, c10::ScalarType dtype,
                          ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_as<float>(out, sources, count, op);
    case c10::ScalarType::BFloat16:
      return reduce_as<c10::BFloat16>(out, sources, count, op);
    case c10::ScalarType::Half:
      return reduce_as<c10::Half>(out, sources, count, op);
    case c10::ScalarType::Double:
      return reduce_as<double>(out, sources, count, op);
    case c10::ScalarType::Long:
      return reduce_as<int64_t>(out, sources, count, op);
    case c10::ScalarType::Byte:
      return reduce_as<uint8_t>(out, sources, count, op);
    default:
      TORCH_CHECK(false, "a reduction across ranks takes fp32, bf16, fp16, fp64, int64 or uint8, got ",
                  c10::toString(dtype));
  }
}

}  // namespace megashard
