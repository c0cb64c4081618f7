#include "parallel/collectives/rank_order_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstring>
#include <type_traits>

#include "parallel/lanes/instructions.h"

namespace megashard {

namespace rank_order {
namespace {

#define MEGASHARD_WITH_LANES "parallel/collectives/rank_order_sums.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

using Sources = std::vector<const void*>;

template <class T, class To>
void sum_floats(To* out, const Sources& sources, int64_t count, bool average) {
  MEGASHARD_RUN(SumOfRanks, out, sources.data(), static_cast<int64_t>(sources.size()), count, average)
}
#undef MEGASHARD_RUN

/// Folds combine(left, right) over the sources' values.
template <class T, class Combine>
void fold(T* out, const Sources& sources, int64_t count, Combine combine) {
  for (int64_t i = 0; i < count; ++i) {
    T value = static_cast<const T*>(sources[0])[i];
    for (size_t k = 1; k < sources.size(); ++k) {
      value = static_cast<T>(combine(value, static_cast<const T*>(sources[k])[i]));
    }
    out[i] = value;
  }
}

template <class T>
constexpr bool is_narrow = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;

template <class T>
void sum(T* out, const Sources& sources, int64_t count, bool average) {
  if constexpr (std::is_same_v<T, float> || is_narrow<T>) {
    sum_floats<T>(out, sources, count, average);
  } else {
    fold(out, sources, count, [](T left, T right) { return left + right; });
    for (int64_t i = 0; average && i < count; ++i) out[i] = static_cast<T>(out[i] / static_cast<T>(sources.size()));
  }
}

template <class T>
void reduce(void* untyped, const Sources& sources, int64_t count, ReduceOp op) {
  auto* out = static_cast<T*>(untyped);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return sum(out, sources, count, op == ReduceOp::kAvg);
    case ReduceOp::kMax:  // both propagate NaN, as PyTorch's max and min do
      return fold(out, sources, count, [](T left, T right) { return left > right || left != left ? left : right; });
    case ReduceOp::kMin:
      return fold(out, sources, count, [](T left, T right) { return left < right || left != left ? left : right; });
  }
}

template <class T>
void sum_widened(void* out, const Sources& sources, int64_t count, ReduceOp op) {
  TORCH_CHECK(op == ReduceOp::kSum || op == ReduceOp::kAvg, "only sums and averages widen their numbers");
  sum_floats<T>(static_cast<float*>(out), sources, count, op == ReduceOp::kAvg);
}

}  // namespace
}  // namespace rank_order

void reduce_in_rank_order(void* out, const std::vector<const void*>& sources, int64_t count, ReducedTypes types,
                          ReduceOp op) {
  using enum c10::ScalarType;
  const bool widens = types.from != types.to;
  TORCH_INTERNAL_ASSERT(!widens || types.to == Float);
  switch (types.from) {
    case Float:
      return rank_order::reduce<float>(out, sources, count, op);
    case BFloat16:
      return widens ? rank_order::sum_widened<c10::BFloat16>(out, sources, count, op)
                    : rank_order::reduce<c10::BFloat16>(out, sources, count, op);
    case Half:
      return widens ? rank_order::sum_widened<c10::Half>(out, sources, count, op)
                    : rank_order::reduce<c10::Half>(out, sources, count, op);
    case Double:
      return rank_order::reduce<double>(out, sources, count, op);
    case Long:
      return rank_order::reduce<int64_t>(out, sources, count, op);
    case Byte:
      return rank_order::reduce<uint8_t>(out, sources, count, op);
    default:
      TORCH_CHECK(false, "a reduction across ranks takes fp32, bf16, fp16, fp64, int64 or uint8, got ",
                  c10::toString(types.from));
  }
}

}  // namespace megashard
