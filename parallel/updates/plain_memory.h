#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "parallel/copies/float_formats.h"
#include "parallel/copies/tiles.h"

namespace megashard {

/// Reads and writes arrays of any format as Real (float or double). `i`: element index, a multiple of kVector for
/// aligned vectors. Kernels take this class as a template argument, so that tests can count their traffic.
struct PlainMemory {
  template <class T, class Real, int kVector>
  static constexpr Vector<Real, kVector> load_as(const void* array, int64_t i) {
    const void* at = static_cast<const T*>(array) + i;
    const auto in = *static_cast<const Vector<T, kVector>*>(at);
    Vector<Real, kVector> out{};
    for (int k = 0; k < kVector; ++k) {
      if constexpr (std::is_same_v<T, double>) {
        out.values[k] = static_cast<Real>(in.values[k]);
      } else {
        out.values[k] = static_cast<Real>(to_float(in.values[k]));
      }
    }
    return out;
  }
  template <class Real, int kVector>
  static constexpr Vector<Real, kVector> load(const void* array, FloatFormat format, int64_t i) {
    switch (format) {
      case FloatFormat::kFloat:
        return load_as<float, Real, kVector>(array, i);
      case FloatFormat::kDouble:
        return load_as<double, Real, kVector>(array, i);
      case FloatFormat::kBFloat16:
        return load_as<BFloat16Bits, Real, kVector>(array, i);
      case FloatFormat::kHalf:
        break;
    }
    return load_as<HalfBits, Real, kVector>(array, i);
  }

  template <class T, class Real, int kVector>
  static constexpr void store_as(void* array, int64_t i, const Vector<Real, kVector>& values) {
    Vector<T, kVector> out{};
    for (int k = 0; k < kVector; ++k) {
      if constexpr (std::is_same_v<T, double>) {
        out.values[k] = static_cast<double>(values.values[k]);
      } else {
        round_to(out.values[k], static_cast<float>(values.values[k]));
      }
    }
    void* to = static_cast<T*>(array) + i;
    *static_cast<Vector<T, kVector>*>(to) = out;
  }
  template <class Real, int kVector>
  static constexpr void store(void* array, FloatFormat format, int64_t i, const Vector<Real, kVector>& values) {
    switch (format) {
      case FloatFormat::kFloat:
        return store_as<float>(array, i, values);
      case FloatFormat::kDouble:
        return store_as<double>(array, i, values);
      case FloatFormat::kBFloat16:
        return store_as<BFloat16Bits>(array, i, values);
      case FloatFormat::kHalf:
        return store_as<HalfBits>(array, i, values);
    }
  }
};

}  // namespace megashard
