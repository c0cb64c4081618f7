#pragma once

#include <cstdint>

#include "parallel/copies/float_formats.h"
#include "parallel/copies/traffic.h"

/// Kernels of an fp8 all-gather and the code of their threads; see copy_table.h.
namespace megashard {

/// Converts rows to fp8, with a scale per row or one for all: value = fp8 * scale. One scale takes two launches
/// (largest magnitude, then values); a scale per row takes one, with a warp per row.
struct Float8Quantise {
  const void* rows;
  FloatFormat format;
  bool power_of_two;
  bool vectors;  // `rows` and `payload` are aligned for 8-element access
  int64_t numel;
  Float8Bits* payload;  // [scale_count, row_numel]; zeros after the rows
  int64_t row_numel;    // values per scale
  int64_t scale_count;
  float* scales;
  uint32_t* amax;  // for one scale: bits of the largest magnitude; zero initially
};

/// Writes every rank's payload to its part of the whole. A rank's chunk is `runs` runs of `chunk_run` elements in the
/// whole, interleaved with the other ranks' runs; the last ranks' runs may be shorter.
struct Float8Dequantise {
  const Float8Bits* payload;
  const float* scales;
  int64_t payload_stride;  // elements between ranks
  int64_t scale_stride;
  int64_t row_numel;  // values per scale; with several scales, a payload has fewer than 2^32
  int32_t ranks;
  FloatFormat format;
  bool vectors;  // 8 payload elements are adjacent in the whole, and both are aligned
  int64_t runs;
  int64_t chunk_run;
  int64_t whole_run;
  void* whole;
};

/// Inf and NaN have the largest bits, so they become the maximum, and all values NaN.
constexpr float float8_scale(uint32_t amax, bool power_of_two) {
  constexpr float kSmallestNormal = 0x1p-126F;  // its reciprocal is finite, too
  const float exact = std::bit_cast<float>(amax) / kFloat8Largest;
  const float scale = exact < kSmallestNormal ? kSmallestNormal : exact;
  const auto bits = std::bit_cast<uint32_t>(scale);
  if (!power_of_two || bits >= kInfinityBits) return scale;
  return std::bit_cast<float>((bits + 0x7fffffU) & kInfinityBits);
}

template <class T>
struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight {
  T values[8];
};

template <class T>
constexpr Eight<T> load_eight(const T* from) {
  return *static_cast<const Eight<T>*>(static_cast<const void*>(from));
}

/// Number of the scale's values that are in `rows`.
constexpr int64_t count_of_row(const Float8Quantise& quantise, int64_t row) {
  const int64_t left = quantise.numel - row * quantise.row_numel;
  return left < 0 ? 0 : left < quantise.row_numel ? left : quantise.row_numel;
}

/// Largest magnitude of a row's elements thread, thread + threads, ...; 8 at once if aligned.
template <class From>
constexpr uint32_t amax_of_thread(const Float8Quantise& quantise, int64_t row, int64_t thread, int64_t threads) {
  const From* rows = static_cast<const From*>(quantise.rows) + row * quantise.row_numel;
  const int64_t numel = count_of_row(quantise, row);
  const int64_t by_eights = quantise.vectors ? numel / 8 : 0;
  uint32_t amax = 0;
  auto include = [&amax](float value) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(value) & ~kSignBit;
    if (magnitude > amax) amax = magnitude;
  };
  for (int64_t i = thread; i < by_eights; i += threads) {
    const auto eight = load_eight(rows + 8 * i);
    for (int k = 0; k < 8; ++k) include(to_float(eight.values[k]));
  }
  for (int64_t i = 8 * by_eights + thread; i < numel; i += threads) include(to_float(rows[i]));
  return amax;
}

template <class From>
constexpr void quantise_in_thread(const Float8Quantise& quantise, int64_t row, uint32_t amax, int64_t thread,
                                  int64_t threads) {
  const From* rows = static_cast<const From*>(quantise.rows) + row * quantise.row_numel;
  Float8Bits* payload = quantise.payload + row * quantise.row_numel;
  const float scale = float8_scale(amax, quantise.power_of_two);
  const float inverse = 1.0F / scale;
  if (thread == 0) quantise.scales[row] = scale;
  const int64_t numel = count_of_row(quantise, row);
  const int64_t by_eights = quantise.vectors ? numel / 8 : 0;
  for (int64_t i = thread; i < by_eights; i += threads) {
    const auto eight = load_eight(rows + 8 * i);
    Eight<Float8Bits> out;
    for (int k = 0; k < 8; ++k) round_to(out.values[k], to_float(eight.values[k]) * inverse);
    *static_cast<Eight<Float8Bits>*>(static_cast<void*>(payload + 8 * i)) = out;
  }
  for (int64_t i = 8 * by_eights + thread; i < quantise.row_numel; i += threads) {
    Float8Bits number{0};
    if (i < numel) round_to(number, to_float(rows[i]) * inverse);
    payload[i] = number;
  }
}

/// True if a payload has several scales.
constexpr bool has_rows(const Float8Dequantise& dequantise) {
  return dequantise.row_numel < dequantise.runs * dequantise.chunk_run;
}

/// Handles elements thread, thread + threads, ... of one rank's payload. Uses 32-bit divisions to find rows: two 64-bit
/// ones would spill a GPU thread's registers to its stack.
template <class To, bool kHasRows>
constexpr void dequantise_payload(const Float8Dequantise& dequantise, int rank, int64_t thread, int64_t threads) {
  const Float8Bits* payload = dequantise.payload + rank * dequantise.payload_stride;
  const float* scales = dequantise.scales + rank * dequantise.scale_stride;
  const int64_t first = rank * dequantise.chunk_run;  // this rank's offset in each run of the whole
  const int64_t numel = dequantise.runs * dequantise.chunk_run;
  const int64_t step = dequantise.vectors ? 8 : 1;
  const auto quotient = [](int64_t number, int64_t divisor) -> int64_t {
    return kHasRows ? static_cast<uint32_t>(number) / static_cast<uint32_t>(divisor) : number / divisor;
  };
  for (int64_t i = thread * step; i < numel; i += threads * step) {
    const int64_t run = dequantise.runs == 1 ? 0 : quotient(i, dequantise.chunk_run);
    const int64_t place = first + i - run * dequantise.chunk_run;
    const float scale = scales[kHasRows ? quotient(i, dequantise.row_numel) : 0];
    To* to = static_cast<To*>(dequantise.whole) + run * dequantise.whole_run + place;
    if (step == 8 && place + 8 <= dequantise.whole_run) {
      const auto eight = load_eight(payload + i);
      Eight<To> out;
      for (int k = 0; k < 8; ++k) round_to(out.values[k], to_float(eight.values[k]) * scale);
      *static_cast<Eight<To>*>(static_cast<void*>(to)) = out;
    } else {
      for (int64_t k = 0; k < step && i + k < numel && place + k < dequantise.whole_run; ++k)
        round_to(to[k], to_float(payload[i + k]) * scale);
    }
  }
}

template <class To>
constexpr void dequantise_in_thread(const Float8Dequantise& dequantise, int rank, int64_t thread, int64_t threads) {
  if (has_rows(dequantise)) return dequantise_payload<To, true>(dequantise, rank, thread, threads);
  dequantise_payload<To, false>(dequantise, rank, thread, threads);
}

/// Counts the rows twice: they are read again once the largest magnitude is known.
constexpr Traffic traffic_of(const Float8Quantise& quantise) {
  const int64_t rows = quantise.numel * size_of(quantise.format);
  const int64_t least = rows + quantise.scale_count * (quantise.row_numel + 4);
  return {.moved = least + rows, .again = rows, .least = least};
}
constexpr Traffic traffic_of(const Float8Dequantise& dequantise) {
  const int64_t numel = dequantise.runs * dequantise.whole_run;
  const int64_t of_rank = dequantise.runs * dequantise.chunk_run;
  const int64_t scales = of_rank > dequantise.row_numel ? of_rank / dequantise.row_numel : 1;
  const int64_t bytes = numel * (1 + size_of(dequantise.format)) + 4 * scales * dequantise.ranks;
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard
