#pragma once

#include <cassert>
#include <limits>

#include "models/kernels/gpu/row_threads.h"

/// Cross-entropy of rows of logits; values and negative labels as in cpu_kernels.h. A label past the row stops the
/// GPU's program by an assertion, as in LibTorch's kernels.
namespace megashard::gpu {

/// logits [rows, width]; labels, loss [rows]; stats [rows, 2].
struct CrossEntropyRows {
  const void* logits;
  const int64_t* labels;
  float* loss;
  float* stats;
  int64_t rows;
  int64_t width;
  FloatFormat format;
};

/// Range of the aligned vectors of a row: rows of odd widths do not start at a multiple of 16 bytes.
template <class T>
struct VectorsOfRow {
  static constexpr int kVector = kVectorOf<T>;
  int64_t begin;
  int64_t count;
  int64_t end;

  constexpr VectorsOfRow(const T* row, int64_t width) : begin(0), count(0), end(0) {
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    begin = past == 0 ? 0 : kVector - past;
    if (begin > width) begin = width;
    count = (width - begin) / kVector;
    end = begin + count * kVector;
  }
};

/// The sum of exp(logit - largest) with the largest logit so far.
struct MaxSum {
  float largest;
  float sum;

  /// Number subtracted in the exponents; any finite number if only -infinity was seen.
  constexpr float base() const { return largest == -std::numeric_limits<float>::infinity() ? 0.0F : largest; }

  template <class T, int kVector>
  constexpr void include(const Vector<T, kVector>& logits) {
    float most = largest;
    for (const T each : logits.values) most = widened(each) > most ? widened(each) : most;
    if (most > largest) {
      sum *= exp_of(largest - most);
      largest = most;
    }
    const float from = base();
    for (const T each : logits.values) sum += exp_of_negative<T>(widened(each) - from);
  }
};

constexpr MaxSum combined(const MaxSum& one, const MaxSum& other) {
  MaxSum both{one.largest > other.largest ? one.largest : other.largest, 0};
  const float from = both.base();
  both.sum = one.sum * exp_of(one.largest - from) + other.sum * exp_of(other.largest - from);
  return both;
}

template <class T>
struct CrossEntropyThreads {
  using Launch = CrossEntropyRows;
  static constexpr int kGroup = 512;
  static constexpr int kAhead = 4;  ///< vectors that a thread loads before it uses the first
  struct Registers {
    MaxSum partial;
  };

  static constexpr int64_t rows(const Launch& launch) { return launch.rows; }
  static constexpr int64_t groups(const Launch& launch) { return launch.rows; }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* logits = static_cast<const T*>(launch.logits) + row * launch.width;
    const VectorsOfRow<T> vectors(logits, launch.width);
    MaxSum all{-std::numeric_limits<float>::infinity(), 0};
    for (int64_t i = lane; i < vectors.begin; i += kGroup) all.include(load<T, 1>(logits + i));
    const T* begin = logits + vectors.begin;
    int64_t v = lane;
    for (; v + (kAhead - 1) * kGroup < vectors.count; v += kAhead * kGroup) {
      Vector<T, kVectorOf<T>> some[kAhead];
      MEGASHARD_UNROLL
      for (int i = 0; i < kAhead; ++i) some[i] = load<T, kVectorOf<T>>(begin + (v + i * kGroup) * kVectorOf<T>);
      MEGASHARD_UNROLL
      for (int i = 0; i < kAhead; ++i) all.include(some[i]);
    }
    for (; v < vectors.count; v += kGroup) all.include(load<T, kVectorOf<T>>(begin + v * kVectorOf<T>));
    for (int64_t i = vectors.end + lane; i < launch.width; i += kGroup) all.include(load<T, 1>(logits + i));
    mine.partial = all;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    if (lane != 0) return;
    const auto [largest, sum] = mine.partial;
    const float beyond = largest - largest;  // NaN for infinities
    const auto log_sum = static_cast<float>(std::log(static_cast<double>(sum + beyond)));
    launch.stats[2 * row] = largest;
    launch.stats[2 * row + 1] = log_sum;
    const int64_t label = launch.labels[row];
    assert(label < launch.width && "a label lies outside the model's vocabulary");
    const T* logits = static_cast<const T*>(launch.logits) + row * launch.width;
    launch.loss[row] = label < 0 ? 0.0F : log_sum - (widened(logits[label]) - largest);
  }

  static constexpr void end(const Launch& /*launch*/, int64_t /*group*/, int /*lane*/, Registers& /*mine*/) {}
};

constexpr Traffic traffic_of(const CrossEntropyRows& launch) {
  const int64_t size = size_of(launch.format);
  const int64_t least = launch.rows * (launch.width * size + 8 + 12);
  return {.moved = least + launch.rows * size, .again = launch.rows * size, .least = least};
}
}  // namespace megashard::gpu
