#pragma once

#include "models/kernels/gpu/row_threads.h"

/// silu(gate) * up and its gradient, elementwise, with the formulas and rounding of row_kernels.inc.
namespace megashard::gpu {

/// Rows of gate and up, and of their gradients, start `stride` elements apart. Contiguous tensors are one row; columns
/// of a joint product are not.
struct SwigluRows {
  int64_t rows;
  int64_t width;
  int64_t stride;
  constexpr int64_t numel() const { return rows * width; }
};

/// gate, up; y [rows, width], contiguous
struct SwigluElements {
  const void* gate;
  const void* up;
  void* y;
  SwigluRows shape;
  FloatFormat format;
  bool vectors;  ///< all rows are aligned to 16 bytes
};

/// grad_y [rows, width], contiguous; gate, up, grad_gate, grad_up
struct SwigluGradElements {
  const void* grad_y;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  void* y;  ///< null, or receives silu(gate) * up, contiguous; may be grad_y
  SwigluRows shape;
  FloatFormat format;
  bool vectors;
};

template <class T>
constexpr float silu_of(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) return x * sigmoid_of<T>(x);
#endif
  return x / (1.0F + exp_of(-x));
}

/// `place` is the offset in contiguous memory, `at` in strided rows.
template <class T, int kVector>
constexpr void swiglu_at(const SwigluElements& launch, int64_t place, int64_t at) {
  const auto gate = load<T, kVector>(static_cast<const T*>(launch.gate) + at);
  const auto up = load<T, kVector>(static_cast<const T*>(launch.up) + at);
  Vector<T, kVector> y{};
  for (int k = 0; k < kVector; ++k) {
    const float g = widened(gate.values[k]);
    y.values[k] = narrowed<T>(rounded<T>(silu_of<T>(g)) * widened(up.values[k]));
  }
  store(static_cast<T*>(launch.y) + place, y);
}

template <class T, int kVector>
constexpr void swiglu_at(const SwigluGradElements& launch, int64_t place, int64_t at) {
  const auto grad_y = load<T, kVector>(static_cast<const T*>(launch.grad_y) + place);
  const auto gate = load<T, kVector>(static_cast<const T*>(launch.gate) + at);
  const auto up = load<T, kVector>(static_cast<const T*>(launch.up) + at);
  Vector<T, kVector> grad_gate{}, grad_up{}, y{};
  for (int k = 0; k < kVector; ++k) {
    const float dy = widened(grad_y.values[k]), g = widened(gate.values[k]), u = widened(up.values[k]);
    const float sigmoid = sigmoid_of<T>(g), silu = rounded<T>(silu_of<T>(g));
    grad_up.values[k] = narrowed<T>(dy * silu);
    grad_gate.values[k] = narrowed<T>(dy * u * sigmoid * (1.0F + g * (1.0F - sigmoid)));
    y.values[k] = narrowed<T>(silu * u);
  }
  store(static_cast<T*>(launch.grad_gate) + at, grad_gate);
  store(static_cast<T*>(launch.grad_up) + at, grad_up);
  if (launch.y != nullptr) store(static_cast<T*>(launch.y) + place, y);
}

/// a / b. GPUs divide 32-bit numbers several times faster.
constexpr int64_t quotient(int64_t a, int64_t b) {
  return a <= UINT32_MAX && b <= UINT32_MAX ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

/// For either launch: processes vectors thread, thread + threads, ... of all rows, then likewise the elements after
/// each row's last vector.
template <class T, class Launch>
constexpr void swiglu_in_thread(const Launch& launch, int64_t thread, int64_t threads) {
  const auto& [rows, width, stride] = launch.shape;
  const int64_t vectors = launch.vectors ? width / kVectorOf<T> : 0;  // per row
  const int64_t rest = width - vectors * kVectorOf<T>;
  for (int64_t v = thread; v < rows * vectors; v += threads) {
    const int64_t row = rows == 1 ? 0 : quotient(v, vectors);
    const int64_t column = (v - row * vectors) * kVectorOf<T>;
    swiglu_at<T, kVectorOf<T>>(launch, row * width + column, row * stride + column);
  }
  for (int64_t i = thread; i < rows * rest; i += threads) {
    const int64_t row = rows == 1 ? 0 : quotient(i, rest);
    const int64_t column = width - rest + i - row * rest;
    swiglu_at<T, 1>(launch, row * width + column, row * stride + column);
  }
}

constexpr Traffic traffic_of(const SwigluElements& launch) {
  const int64_t bytes = 3 * launch.shape.numel() * size_of(launch.format);
  return {.moved = bytes, .again = 0, .least = bytes};
}
constexpr Traffic traffic_of(const SwigluGradElements& launch) {
  const int64_t bytes = (launch.y == nullptr ? 5 : 6) * launch.shape.numel() * size_of(launch.format);
  return {.moved = bytes, .again = 0, .least = bytes};
}

}  // namespace megashard::gpu
