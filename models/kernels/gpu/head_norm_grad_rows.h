#pragma once

#include "models/kernels/gpu/head_shape.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"

/// Gradient of head_norm_rows.h.
namespace megashard::gpu {

/// grad_y, grad_x as x, contiguous; partial [groups, head_dim] and grad_weight [head_dim] as in RmsNormGradRows.
struct HeadNormGradRows {
  const void* grad_y;
  const void* x;
  const void* weight;
  const void* cos;
  const void* sin;
  const float* inverse_rms;
  void* grad_x;
  float* partial;
  float* grad_weight;
  int64_t groups;
  HeadShape shape;
};

constexpr int64_t head_grad_groups(const HeadShape& shape) {
  const int64_t most = 264 * kBlock / head_group(shape), by_rows = (head_rows(shape) + 3) / 4;
  return by_rows < most ? by_rows : most;
}

/// A thread processes the same channels in all rows of its group.
template <class T, int kVector, int kGroupSize>
struct HeadNormGradThreads {
  using Launch = HeadNormGradRows;
  using Values = Vector<T, kVector>;
  static constexpr int kGroup = kGroupSize;
  struct Half {
    Values x, grad;  // grad is that of the norm's result
    float grad_weight[kVector];
  };
  struct Registers {
    Half first[kHeldOfHead<kVector>]{}, second[kHeldOfHead<kVector>]{};
    float partial;
  };
  static constexpr int64_t rows(const Launch& launch) { return head_rows(launch.shape); }
  static constexpr int64_t groups(const Launch& launch) { return launch.groups; }

  static constexpr float factor_of(const Launch& launch, T weight) {
    return launch.shape.zero_centered ? 1.0F + widened(weight) : widened(weight);
  }

  static constexpr void before(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const HeadShape& shape = launch.shape;
    const T* x = static_cast<const T*>(launch.x) + place_of_head(shape, row);
    const T* grad_y = static_cast<const T*>(launch.grad_y) + row * shape.head_dim;
    const int64_t angles = angles_of_head(shape, row);
    float products = 0;
    const auto add = [&](const Half& half, int channel) {
      const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + channel);
      for (int k = 0; k < kVector; ++k)
        products += widened(half.grad.values[k]) * factor_of(launch, weight.values[k]) * widened(half.x.values[k]);
    };
    for_items<kGroup, kVector>(shape, lane, [&](int place, bool turns, int i) {
      Half &first = mine.first[i], &second = mine.second[i];
      second.x = load<T, kVector>(x + shape.half + place);
      second.grad = load<T, kVector>(grad_y + shape.half + place);
      if (turns) {
        first.x = load<T, kVector>(x + place);
        first.grad = load<T, kVector>(grad_y + place);
        const auto cos = load<T, kVector>(static_cast<const T*>(launch.cos) + angles + place);
        const auto sin = load<T, kVector>(static_cast<const T*>(launch.sin) + angles + place);
        for (int k = 0; k < kVector; ++k) {
          const float a = widened(first.grad.values[k]), b = widened(second.grad.values[k]);
          const float c = widened(cos.values[k]), s = widened(sin.values[k]);
          first.grad.values[k] = narrowed<T>(a * c + b * s);
          second.grad.values[k] = narrowed<T>(b * c - a * s);
        }
        add(first, place);
      }
      add(second, shape.half + place);
    });
    mine.partial = products;
  }

  static constexpr void after(const Launch& launch, int64_t row, int lane, Registers& mine) {
    const HeadShape& shape = launch.shape;
    T* grad_x = static_cast<T*>(launch.grad_x) + row * shape.head_dim;
    const float scale = launch.inverse_rms[row];
    const float along = mine.partial * scale * scale * scale / static_cast<float>(shape.head_dim);
    const auto finish = [&](Half& half, int channel) {
      const auto weight = load<T, kVector>(static_cast<const T*>(launch.weight) + channel);
      Values out{};
      for (int k = 0; k < kVector; ++k) {
        const float value = widened(half.x.values[k]), gradient = widened(half.grad.values[k]);
        out.values[k] = narrowed<T>(gradient * factor_of(launch, weight.values[k]) * scale - along * value);
        const float normed = value * scale;
        half.grad_weight[k] += gradient * (shape.zero_centered ? normed : rounded<T>(normed));
      }
      store(grad_x + channel, out);
    };
    for_items<kGroup, kVector>(shape, lane, [&](int place, bool turns, int i) {
      if (turns) finish(mine.first[i], place);
      finish(mine.second[i], shape.half + place);
    });
  }

  static constexpr void end(const Launch& launch, int64_t group, int lane, Registers& mine) {
    if (launch.partial == nullptr) return;
    float* partial = launch.partial + group * launch.shape.head_dim;
    for_items<kGroup, kVector>(launch.shape, lane, [&](int place, bool turns, int i) {
      for (int k = 0; k < kVector; ++k) {
        if (turns) partial[place + k] = mine.first[i].grad_weight[k];
        partial[launch.shape.half + place + k] = mine.second[i].grad_weight[k];
      }
    });
  }
};

/// The sum of a gradient over groups: RmsNormGradRows' second launch.
constexpr RmsNormGradRows column_sums_of(const HeadNormGradRows& launch) {
  RmsNormGradRows sums{};
  sums.partial = launch.partial;
  sums.grad_weight = launch.grad_weight;
  sums.width = launch.shape.head_dim;
  sums.groups = launch.groups;
  return sums;
}

constexpr Traffic traffic_of(const HeadNormGradRows& launch) {
  Traffic traffic = traffic_of_heads(launch.shape, 3, 2);
  if (launch.partial == nullptr) return traffic;
  traffic.least += 4 * launch.shape.head_dim;
  traffic.moved += 4 * launch.shape.head_dim * (2 * launch.groups + 1);
  return traffic;
}

}  // namespace megashard::gpu
