#pragma once

#include "models/kernels/gpu/rms_norm_rows.h"

/// Gradient of RMSNorm, with the formulas and rounding of cpu_kernels.h.
namespace megashard::gpu {

/// grad_y, x, grad_x [rows, width]; grad_weight [width], the sum over partial [groups, width] in group order: equal
/// sizes give equal bits on every GPU. Both may be null. grad_sum [rows, width] or null: added to grad_x, both rounded.
struct RmsNormGradRows {
  const void* grad_y;
  const void* x;
  const void* weight;
  const float* inverse_rms;
  const void* grad_sum;
  void* grad_x;
  float* partial;
  float* grad_weight;
  int64_t rows;
  int64_t width;
  int64_t groups;
  FloatFormat format;
  bool vectors;
};

constexpr int norm_grad_threads_at_once(int group) { return group == kLongestNormGroup ? 512 : 768; }

/// Groups of RmsNormGradRows: as many as 132 multiprocessors run at a time, with at least four rows each.
constexpr int64_t norm_grad_groups(int64_t rows, int64_t width, FloatFormat format, bool vectors) {
  const int group = norm_group(width, format, vectors);
  const int64_t most = int64_t{132} * norm_grad_threads_at_once(group) / group;
  const int64_t by_rows = (rows + 3) / 4;
  return by_rows < most ? by_rows : most;
}

/// A thread processes the same columns in all rows of its group, so their sums need no barrier.
template <class T, int kVector, int kGroupSize>
struct RmsNormGradThreads {
  using Launch = RmsNormGradRows;
  static constexpr int kGroup = kGroupSize;
  static constexpr int kHeld = kGroup == kLongestNormGroup ? kHeldByNormGrad : kHeldOfRow;
  static constexpr int kThreadsAtOnce = norm_grad_threads_at_once(kGroup);
  struct Registers {
    Vector<T, kVector> x[kHeld];
    Vector<T, kVector> grad_y[kHeld];
    float grad_weight[kHeld][kVector]{};
    float partial;
  };

  static constexpr int64_t rows(const Launch& launch) { return launch.rows; }
  static constexpr int64_t groups(const Launch& launch) { return launch.groups; }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.x) + row * launch.width;
    const T* grad_y = static_cast<const T*>(launch.grad_y) + row * launch.width;
    float products = 0;
    for_vectors<kGroup, kHeld>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      const auto of_x = load<T, kVector>(x + v * kVector), of_y = load<T, kVector>(grad_y + v * kVector);
      const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + v * kVector);
      if (i < kHeld) {
        mine.x[i] = of_x;
        mine.grad_y[i] = of_y;
      }
      for (int k = 0; k < kVector; ++k)
        products += widened(of_y.values[k]) * widened(weight.values[k]) * widened(of_x.values[k]);
    });
    mine.partial = products;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.x) + row * launch.width;
    const T* grad_y = static_cast<const T*>(launch.grad_y) + row * launch.width;
    T* grad_x = static_cast<T*>(launch.grad_x) + row * launch.width;
    const int64_t group = row % launch.groups;
    const float scale = launch.inverse_rms[row];
    const float along = mine.partial * scale * scale * scale / static_cast<float>(launch.width);
    for_vectors<kGroup, kHeld>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      const auto of_x = i < kHeld ? mine.x[i] : load<T, kVector>(x + v * kVector);
      const auto of_y = i < kHeld ? mine.grad_y[i] : load<T, kVector>(grad_y + v * kVector);
      const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + v * kVector);
      Vector<T, kVector> out{};
      if (launch.grad_sum != nullptr)
        out = load<T, kVector>(static_cast<const T*>(launch.grad_sum) + row * launch.width + v * kVector);
      for (int k = 0; k < kVector; ++k) {
        const float value = widened(of_x.values[k]), gradient = widened(of_y.values[k]);
        const float of_norm = gradient * widened(weight.values[k]) * scale - along * value;
        const float before = widened(out.values[k]);  // zero without grad_sum
        out.values[k] = narrowed<T>(launch.grad_sum == nullptr ? of_norm : rounded<T>(of_norm) + before);
        if (launch.partial == nullptr) continue;
        const float of_weight = gradient * rounded<T>(value * scale);
        if (i < kHeld) {
          mine.grad_weight[i][k] += of_weight;
        } else {  // longer rows: in memory, at a place that only this thread uses
          float& sum = launch.partial[group * launch.width + v * kVector + k];
          sum = row == group ? of_weight : sum + of_weight;
        }
      }
      store(grad_x + v * kVector, out);
    });
  }

  static constexpr void end(const Launch& launch, int64_t group, int lane, Registers& mine) {
    if (launch.partial == nullptr) return;
    float* partial = launch.partial + group * launch.width;
    for_vectors<kGroup, kHeld>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      if (i == kHeld) return;
      for (int k = 0; k < kVector; ++k) partial[v * kVector + k] = mine.grad_weight[i][k];
    });
  }
};

/// The second launch of RmsNormGradRows: a block sums kColumns columns of `partial`, starting at `first`; a barrier
/// separates part() and whole(). parts [kParts, kColumns] is shared by the block.
struct ColumnSums {
  static constexpr int kColumns = 32;
  static constexpr int kParts = 32;
  static constexpr int kThreads = kColumns * kParts;

  static constexpr void part(const RmsNormGradRows& launch, int64_t first, int thread, float* parts) {
    const int64_t column = first + thread % kColumns;
    float sum = 0;
    if (column < launch.width) {
      for (int64_t group = thread / kColumns; group < launch.groups; group += kParts)
        sum += launch.partial[group * launch.width + column];
    }
    parts[thread] = sum;
  }
  static constexpr void whole(const RmsNormGradRows& launch, int64_t first, int thread, const float* parts) {
    if (thread >= kColumns || first + thread >= launch.width) return;
    float sum = 0;
    for (int part = 0; part < kParts; ++part) sum += parts[part * kColumns + thread];
    launch.grad_weight[first + thread] = sum;
  }
};

constexpr Traffic traffic_of(const RmsNormGradRows& launch) {
  const int64_t size = size_of(launch.format), row = launch.width * size;
  const int64_t rest = norm_rest(launch.width, launch.format, launch.vectors, kHeldByNormGrad);
  const int64_t again = launch.rows * 2 * (row + rest * size) - row;
  int64_t least = launch.rows * ((launch.grad_sum == nullptr ? 3 : 4) * row + 4) + row, partial = 0;
  if (launch.partial != nullptr) {
    least += 4 * launch.width;
    partial = 4 * 2 * (launch.groups * launch.width + (launch.rows - launch.groups) * rest);
  }
  return {.moved = least + again + partial, .again = again, .least = least};
}

}  // namespace megashard::gpu
