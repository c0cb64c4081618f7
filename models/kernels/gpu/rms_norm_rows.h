#pragma once

#include "models/kernels/gpu/row_threads.h"

/// RMSNorm, with the formulas and rounding of cpu_kernels.h; its gradient is in rms_norm_grad_rows.h.
namespace megashard::gpu {

/// x, y [rows, width]; weight [width]; inverse_rms [rows]. With a branch [rows, width] it normalises x + branch, which
/// is rounded and stored in sum [rows, width]; else both are null.
struct RmsNormRows {
  const void* x;
  const void* branch;
  void* sum;
  const void* weight;
  void* y;
  float* inverse_rms;
  int64_t rows;
  int64_t width;
  float eps;
  FloatFormat format;
  bool vectors;  ///< all rows and weight are aligned to 16 bytes
};

constexpr int kHeldOfRow = 2;           ///< vectors of a row in a thread's registers, for smaller groups
constexpr int kLongestNormGroup = 512;  ///< with more vectors in registers; the rest of longer rows is read again
constexpr int kHeldByNorm = 6;
constexpr int kHeldByNormGrad = 4;  ///< of x and of grad_y, with their sums of grad_weight

/// Threads per row: few, with two vectors each, so that many rows are in flight.
constexpr int norm_group(int64_t width, FloatFormat format, bool vectors) {
  const int64_t of_thread = kHeldOfRow * (vectors ? 16 / size_of(format) : 1);
  int group = kWarp;
  while (group < kLongestNormGroup && width > group * of_thread) group *= 2;
  return group;
}

template <class T, int kVector, int kGroupSize>
struct RmsNormThreads {
  using Launch = RmsNormRows;
  static constexpr int kGroup = kGroupSize;
  static constexpr int kHeld = kGroup == kLongestNormGroup ? kHeldByNorm : kHeldOfRow;
  static constexpr int kThreadsAtOnce = kGroup == kLongestNormGroup ? 512 : 1024;
  struct Registers {
    Vector<T, kVector> x[kHeld];
    float partial;
  };

  static constexpr int64_t rows(const Launch& launch) { return launch.rows; }
  static constexpr int64_t groups(const Launch& launch) { return launch.rows; }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.x) + row * launch.width;
    const T* branch = launch.branch == nullptr ? nullptr : static_cast<const T*>(launch.branch) + row * launch.width;
    const int vectors = static_cast<int>(launch.width) / kVector;
    Vector<T, kVector> of_branch[kHeld]{};
    load_held<kGroup>(lane, vectors, x, mine.x);
    if (branch != nullptr) load_held<kGroup>(lane, vectors, branch, of_branch);
    float squares = 0;
    for_vectors<kGroup, kHeld>(lane, vectors, [&](int v, int i) {
      auto values = i < kHeld ? mine.x[i] : load<T, kVector>(x + v * kVector);
      if (branch != nullptr) {
        const auto added = i < kHeld ? of_branch[i] : load<T, kVector>(branch + v * kVector);
        for (int k = 0; k < kVector; ++k)
          values.values[k] = narrowed<T>(widened(values.values[k]) + widened(added.values[k]));
        store(static_cast<T*>(launch.sum) + row * launch.width + v * kVector, values);
        if (i < kHeld) mine.x[i] = values;
      }
      for (const T each : values.values) squares += widened(each) * widened(each);
    });
    mine.partial = squares;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.branch == nullptr ? launch.x : launch.sum) + row * launch.width;
    T* y = static_cast<T*>(launch.y) + row * launch.width;
    const float scale = 1.0F / std::sqrt(mine.partial / static_cast<float>(launch.width) + launch.eps);
    if (lane == 0) launch.inverse_rms[row] = scale;
    for_vectors<kGroup, kHeld>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      const auto values = i < kHeld ? mine.x[i] : load<T, kVector>(x + v * kVector);
      const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + v * kVector);
      Vector<T, kVector> out{};
      for (int k = 0; k < kVector; ++k) {
        const float normed = rounded<T>(widened(values.values[k]) * scale);
        out.values[k] = narrowed<T>(widened(weight.values[k]) * normed);
      }
      store(y + v * kVector, out);
    });
  }

  static constexpr void end(const Launch& /*launch*/, int64_t /*group*/, int /*lane*/, Registers& /*mine*/) {}
};

template <class Threads>
struct OfThreads {
  using Type = Threads;
};

/// Calls function(OfThreads<Threads<...>>) with the class for `launch`.
template <template <class T, int kVector, int kGroup> class Threads, class Launch, class Function>
void with_norm_threads(const Launch& launch, const Function& function) {
  const int group = norm_group(launch.width, launch.format, launch.vectors);
  const auto of_vectors = [&]<class T, int kVector>(OfThreads<Vector<T, kVector>>) {
    switch (group) {
      case 32:
        return function(OfThreads<Threads<T, kVector, 32>>{});
      case 64:
        return function(OfThreads<Threads<T, kVector, 64>>{});
      case 128:
        return function(OfThreads<Threads<T, kVector, 128>>{});
      case 256:
        return function(OfThreads<Threads<T, kVector, 256>>{});
      default:
        return function(OfThreads<Threads<T, kVector, kLongestNormGroup>>{});
    }
  };
  with_row_format(launch.format, [&](auto zero) {
    using T = decltype(zero);
    if (launch.vectors) {
      of_vectors(OfThreads<Vector<T, kVectorOf<T>>>{});
    } else {
      of_vectors(OfThreads<Vector<T, 1>>{});
    }
  });
}

/// Elements of a row that are read again because registers do not hold them.
constexpr int64_t norm_rest(int64_t width, FloatFormat format, bool vectors, int held) {
  const int64_t in_registers =
      int64_t{norm_group(width, format, vectors)} * held * (vectors ? 16 / size_of(format) : 1);
  return width < in_registers ? 0 : width - in_registers;
}

constexpr Traffic traffic_of(const RmsNormRows& launch) {
  const int64_t size = size_of(launch.format), row = launch.width * size;
  const int64_t rest = norm_rest(launch.width, launch.format, launch.vectors, kHeldByNorm) * size;
  const int64_t arrays = launch.branch == nullptr ? 2 : 4;
  const int64_t least = launch.rows * (arrays * row + 4) + row, again = launch.rows * (row + rest) - row;
  return {.moved = least + again, .again = again, .least = least};
}

}  // namespace megashard::gpu
