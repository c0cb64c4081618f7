#pragma once

#include "models/kernels/gpu/cross_entropy_rows.h"

/// Gradient of cross-entropy, written over the logits; see cpu_kernels.h.
namespace megashard::gpu {

/// logits [rows, width]; labels, grad_loss [rows]; stats [rows, 2].
struct CrossEntropyGradRows {
  static constexpr int64_t kTileBytes = 32768;  ///< part of a row per block

  void* logits;
  const int64_t* labels;
  const float* stats;
  const float* grad_loss;
  int64_t rows;
  int64_t width;
  int64_t ignored;
  FloatFormat format;

  constexpr int64_t tiles_per_row() const { return (width * size_of(format) + kTileBytes - 1) / kTileBytes; }
};

template <class T>
struct CrossEntropyGradThreads {
  static constexpr int kThreads = 256;

  /// Values common to a row's elements.
  struct Row {
    T* logits;
    int64_t label;
    bool ignored;
    float largest, log_sum, scale;

    constexpr Row(const CrossEntropyGradRows& launch, int64_t row)
        : logits(static_cast<T*>(launch.logits) + row * launch.width),
          label(launch.labels[row]),
          ignored(label == launch.ignored),
          largest(launch.stats[2 * row]),
          log_sum(launch.stats[2 * row + 1]),
          scale(launch.grad_loss[row]) {}

    template <int kVector>
    constexpr void write(int64_t place) const {
      auto values = load<T, kVector>(logits + place);
      for (int k = 0; k < kVector; ++k) {
        const float softmax = exp_of_negative<T>((widened(values.values[k]) - largest) - log_sum);
        const float gradient = scale * (place + k == label ? softmax - 1.0F : softmax);
        values.values[k] = narrowed<T>(ignored ? 0.0F : gradient);
      }
      store(logits + place, values);
    }
  };

  /// The part of block `block` of rows * tiles_per_row() for one of its threads.
  static constexpr void run(const CrossEntropyGradRows& launch, int64_t block, int thread) {
    constexpr int64_t kTile = CrossEntropyGradRows::kTileBytes / 16;  // vectors
    const int64_t tile = block % launch.tiles_per_row();
    const Row row(launch, block / launch.tiles_per_row());
    const VectorsOfRow<T> vectors(row.logits, launch.width);
    const int64_t end = (tile + 1) * kTile < vectors.count ? (tile + 1) * kTile : vectors.count;
    for (int64_t v = tile * kTile + thread; v < end; v += kThreads)
      row.template write<kVectorOf<T>>(vectors.begin + v * kVectorOf<T>);
    if (tile > 0) return;
    for (int64_t i = thread; i < vectors.begin; i += kThreads) row.template write<1>(i);
    for (int64_t i = vectors.end + thread; i < launch.width; i += kThreads) row.template write<1>(i);
  }
};

constexpr Traffic traffic_of(const CrossEntropyGradRows& launch) {
  const int64_t bytes = launch.rows * (2 * launch.width * size_of(launch.format) + 8 + 12);
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard::gpu
