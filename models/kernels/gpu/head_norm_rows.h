#pragma once

#include "models/kernels/gpu/head_shape.h"

/// RMSNorm over each head and its rotary embedding, with the formulas and rounding of head_kernels.inc.
namespace megashard::gpu {

/// weight [head_dim]; y as x, contiguous; inverse_rms [rows].
struct HeadNormRows {
  const void* x;
  const void* weight;
  const void* cos;
  const void* sin;
  void* y;
  float* inverse_rms;
  float eps;
  HeadShape shape;
};

template <class T, int kVector, int kGroupSize>
struct HeadNormThreads {
  using Launch = HeadNormRows;
  using Values = Vector<T, kVector>;
  static constexpr int kGroup = kGroupSize;
  struct Registers {
    Values first[kHeldOfHead<kVector>], second[kHeldOfHead<kVector>];
    float partial;
  };
  static constexpr int64_t rows(const Launch& launch) { return head_rows(launch.shape); }
  static constexpr int64_t groups(const Launch& launch) { return head_rows(launch.shape); }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const T* x = static_cast<const T*>(launch.x) + place_of_head(launch.shape, row);
    float squares = 0;
    const auto take = [&](int channel) {
      const auto values = load<T, kVector>(x + channel);
      for (const T each : values.values) squares += widened(each) * widened(each);
      return values;
    };
    for_items<kGroup, kVector>(launch.shape, lane, [&](int place, bool turns, int i) {
      if (turns) mine.first[i] = take(place);
      mine.second[i] = take(launch.shape.half + place);
    });
    mine.partial = squares;
  }

  static constexpr Vector<float, kVector> normed(const Launch& launch, const Values& values, int channel, float scale) {
    const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + channel);
    Vector<float, kVector> out{};
    for (int k = 0; k < kVector; ++k) {
      const float x = widened(values.values[k]) * scale, factor = widened(weight.values[k]);
      out.values[k] = rounded<T>(launch.shape.zero_centered ? (1.0F + factor) * x : factor * rounded<T>(x));
    }
    return out;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const HeadShape& shape = launch.shape;
    T* y = static_cast<T*>(launch.y) + row * shape.head_dim;
    const int64_t angles = angles_of_head(shape, row);
    const float scale = 1.0F / std::sqrt(mine.partial / static_cast<float>(shape.head_dim) + launch.eps);
    if (lane == 0) launch.inverse_rms[row] = scale;
    for_items<kGroup, kVector>(shape, lane, [&](int place, bool turns, int i) {
      auto second = normed(launch, mine.second[i], shape.half + place, scale);
      Values out{};
      if (turns) {
        const auto first = normed(launch, mine.first[i], place, scale);
        const auto cos = load<T, kVector>(static_cast<const T*>(launch.cos) + angles + place);
        const auto sin = load<T, kVector>(static_cast<const T*>(launch.sin) + angles + place);
        for (int k = 0; k < kVector; ++k) {
          const float a = first.values[k], b = second.values[k];
          const float c = widened(cos.values[k]), s = widened(sin.values[k]);
          out.values[k] = narrowed<T>(a * c - b * s);
          second.values[k] = b * c + a * s;
        }
        store(y + place, out);
      }
      for (int k = 0; k < kVector; ++k) out.values[k] = narrowed<T>(second.values[k]);
      store(y + shape.half + place, out);
    });
  }
  static constexpr void end(const Launch& /*launch*/, int64_t /*group*/, int /*lane*/, Registers& /*mine*/) {}
};

constexpr Traffic traffic_of(const HeadNormRows& launch) { return traffic_of_heads(launch.shape, 2, 1); }

}  // namespace megashard::gpu
