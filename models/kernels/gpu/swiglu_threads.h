#pragma once

#include "models/kernels/gpu/row_threads.h"

/// silu(gate) * up and its gradient, element by element, the formulas and roundings of row_kernels.inc.
namespace megashard::gpu {

/// gate, up, y [numel]
struct SwigluElements {
  const void* gate;
  const void* up;
  void* y;
  int64_t numel;
  FloatFormat format;
  bool vectors;  ///< all lie at 16 bytes
};

/// grad_y, gate, up, grad_gate, grad_up [numel]
struct SwigluGradElements {
  const void* grad_y;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  int64_t numel;
  FloatFormat format;
  bool vectors;
};

template <class T, int kVector>
constexpr void swiglu_at(const SwigluElements& launch, int64_t place) {
  const auto gate = load<T, kVector>(static_cast<const T*>(launch.gate) + place);
  const auto up = load<T, kVector>(static_cast<const T*>(launch.up) + place);
  Vector<T, kVector> y{};
  for (int k = 0; k < kVector; ++k) {
    const float g = widened(gate.values[k]);
    y.values[k] = narrowed<T>(rounded<T>(g / (1.0F + exp_of(-g))) * widened(up.values[k]));
  }
  store(static_cast<T*>(launch.y) + place, y);
}

template <class T, int kVector>
constexpr void swiglu_at(const SwigluGradElements& launch, int64_t place) {
  const auto grad_y = load<T, kVector>(static_cast<const T*>(launch.grad_y) + place);
  const auto gate = load<T, kVector>(static_cast<const T*>(launch.gate) + place);
  const auto up = load<T, kVector>(static_cast<const T*>(launch.up) + place);
  Vector<T, kVector> grad_gate{}, grad_up{};
  for (int k = 0; k < kVector; ++k) {
    const float dy = widened(grad_y.values[k]), g = widened(gate.values[k]), u = widened(up.values[k]);
    const float sigmoid = 1.0F / (1.0F + exp_of(-g));
    grad_up.values[k] = narrowed<T>(dy * rounded<T>(g * sigmoid));
    grad_gate.values[k] = narrowed<T>(dy * u * sigmoid * (1.0F + g * (1.0F - sigmoid)));
  }
  store(static_cast<T*>(launch.grad_gate) + place, grad_gate);
  store(static_cast<T*>(launch.grad_up) + place, grad_up);
}

/// Of either launch: vectors thread, thread + threads, ..., and elements after the last vector likewise.
template <class T, class Launch>
constexpr void swiglu_in_thread(const Launch& launch, int64_t thread, int64_t threads) {
  const int64_t vectors = launch.vectors ? launch.numel / kVectorOf<T> : 0;
  for (int64_t v = thread; v < vectors; v += threads) swiglu_at<T, kVectorOf<T>>(launch, v * kVectorOf<T>);
  for (int64_t i = vectors * kVectorOf<T> + thread; i < launch.numel; i += threads) swiglu_at<T, 1>(launch, i);
}

constexpr Traffic traffic_of(const SwigluElements& launch) {
  const int64_t bytes = 3 * launch.numel * size_of(launch.format);
  return {.moved = bytes, .again = 0, .least = bytes};
}
constexpr Traffic traffic_of(const SwigluGradElements& launch) {
  const int64_t bytes = 5 * launch.numel * size_of(launch.format);
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard::gpu
