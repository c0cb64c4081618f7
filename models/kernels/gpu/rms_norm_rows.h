#pragma once

#include "models/kernels/gpu/row_threads.h"

/// RMSNorm, the formulas and roundings of cpu_kernels.h; rms_norm_grad_rows.h is its gradient.
namespace megashard::gpu {

/// x, y [rows, width]; weight [width]; inverse_rms [rows]. With a branch [rows, width], of x + branch, which is rounded
/// and left in sum [rows, width]; else both are null.
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
  bool vectors;  ///< every row, and weight, lie at 16 bytes
};

constexpr int kHeldByNorm = 8;      ///< vectors of x in a thread's registers; what is longer is read again
constexpr int kHeldByNormGrad = 4;  ///< of x and of grad_y, with their sums of grad_weight

/// Threads of a row: as few as hold it in registers in backward, 512 at most.
constexpr int norm_group(int64_t width, FloatFormat format, bool vectors) {
  const int64_t of_thread = kHeldByNormGrad * (vectors ? 16 / size_of(format) : 1);
  return width <= kWarp * of_thread ? kWarp : width <= kBlock * of_thread ? kBlock : 2 * kBlock;
}

template <class T, int kVector, int kGroupSize>
struct RmsNormThreads {
  using Launch = RmsNormRows;
  static constexpr int kGroup = kGroupSize;
  struct Registers {
    Vector<T, kVector> x[kHeldByNorm];
    float partial;
  };

  static constexpr int64_t rows(const Launch& launch) { return launch.rows; }
  static constexpr int64_t groups(const Launch& launch) { return launch.rows; }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.x) + row * launch.width;
    float squares = 0;
    for_vectors<kGroup, kHeldByNorm>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      auto values = load<T, kVector>(x + v * kVector);
      if (launch.branch != nullptr) {
        const auto added = load<T, kVector>(static_cast<const T*>(launch.branch) + row * launch.width + v * kVector);
        for (int k = 0; k < kVector; ++k)
          values.values[k] = narrowed<T>(widened(values.values[k]) + widened(added.values[k]));
        store(static_cast<T*>(launch.sum) + row * launch.width + v * kVector, values);
      }
      if (i < kHeldByNorm) mine.x[i] = values;
      for (const T each : values.values) squares += widened(each) * widened(each);
    });
    mine.partial = squares;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.branch == nullptr ? launch.x : launch.sum) + row * launch.width;
    T* y = static_cast<T*>(launch.y) + row * launch.width;
    const float scale = 1.0F / std::sqrt(mine.partial / static_cast<float>(launch.width) + launch.eps);
    if (lane == 0) launch.inverse_rms[row] = scale;
    for_vectors<kGroup, kHeldByNorm>(lane, static_cast<int>(launch.width) / kVector, [&](int v, int i) {
      const auto values = i < kHeldByNorm ? mine.x[i] : load<T, kVector>(x + v * kVector);
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

/// function(OfThreads<Threads<...>>), the class that `launch` asks for.
template <template <class T, int kVector, int kGroup> class Threads, class Launch, class Function>
void with_norm_threads(const Launch& launch, const Function& function) {
  const int group = norm_group(launch.width, launch.format, launch.vectors);
  const auto of_vectors = [&]<class T, int kVector>(OfThreads<Vector<T, kVector>>) {
    if (group == kWarp) {
      function(OfThreads<Threads<T, kVector, kWarp>>{});
    } else if (group == kBlock) {
      function(OfThreads<Threads<T, kVector, kBlock>>{});
    } else {
      function(OfThreads<Threads<T, kVector, 2 * kBlock>>{});
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

/// Elements of a row that are read once more for want of registers.
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
