#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "parallel/copies/copy_table.h"
#include "parallel/copies/traffic.h"

/// Common parts of the row kernels' threads. Compiled by nvcc for the GPU and by the host's compiler, where the threads
/// of a group run sequentially between two barriers (gpu_kernels.cpp). A group, a warp or a block, processes one row at
/// a time. Its class defines, each for one thread (`lane` of kGroup):
///
///   Launch, Registers            the kernel's arguments, and a thread's state; `partial` is reduced
///   rows(), groups()             group g processes rows g, g + groups(), ...
///   before(), after()            a row before and after the reduction over its group
///   end()                        after the group's last row
namespace megashard::gpu {

#if defined(__CUDACC__)
#define MEGASHARD_UNROLL _Pragma("unroll")
#else
#define MEGASHARD_UNROLL
#endif

constexpr int kWarp = 32;
constexpr int kBlock = 256;  ///< threads per block, except groups of several warps, which are one block each

template <class T>
constexpr int kVectorOf = 16 / sizeof(T);

/// Converts to fp32. The GPU's instruction gives the bits of float_formats.h, except for NaN.
template <class T>
constexpr float widened(T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, HalfBits>) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
  }
#endif
  return to_float(value);
}
/// Converts to T, to nearest even; likewise.
template <class T>
constexpr T narrowed(float value) {
  T narrow{};
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, HalfBits>) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
  } else if constexpr (std::is_same_v<T, BFloat16Bits>) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
  }
#endif
  round_to(narrow, value);
  return narrow;
}
/// The value after conversion to T.
template <class T>
constexpr float rounded(float value) {
  return widened(narrowed<T>(value));
}

/// Clamped to [-86, 88] as exp_of in lanes.inc, so that infinities give the same results; NaN stays NaN.
constexpr float exp_of(float x) {
  x = x > 88.0F ? 88.0F : x;
  x = x < -86.0F ? -86.0F : x;
  return std::exp(x);
}

#if defined(__CUDA_ARCH__)
/// e^x with the GPU's instruction, relative error 2^-22: a third of the work, which would otherwise limit 16-bit
/// kernels below the memory bandwidth.
constexpr float exp_by_instruction(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504F));
  return power;
}
#endif

/// exp_of(x) for x <= 0 or NaN, in a sum or product that is rounded to T: uses the instruction for 16 bits.
template <class T>
constexpr float exp_of_negative(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) return exp_by_instruction(x);
#endif
  return exp_of(x);
}

/// 1 / (1 + e^-x), likewise; never 0, so that infinities give the results of exp_of.
template <class T>
constexpr float sigmoid_of(float x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    x = x < -87.0F ? -87.0F : x;
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0F + exp_by_instruction(-x)));
    return reciprocal;
  }
#endif
  return 1.0F / (1.0F + exp_of(-x));
}

template <class T, int kVector>
constexpr Vector<T, kVector> load(const T* from) {
  return *static_cast<const Vector<T, kVector>*>(static_cast<const void*>(from));
}
template <class T, int kVector>
constexpr void store(T* to, const Vector<T, kVector>& values) {
  *static_cast<Vector<T, kVector>*>(static_cast<void*>(to)) = values;
}

/// Calls body(v, i) for vectors v = lane, lane + kGroup, ... of a row. i counts up to kHeld, the number of vectors in a
/// thread's registers, and is kHeld for the following ones.
template <int kGroup, int kHeld, class Body>
constexpr void for_vectors(int lane, int vectors, const Body& body) {
  MEGASHARD_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    if (lane + i * kGroup < vectors) body(lane + i * kGroup, i);
  }
  for (int v = lane + kHeld * kGroup; v < vectors; v += kGroup) body(v, kHeld);
}

/// Loads the vectors of a row that a thread holds, all before the first arrives.
template <int kGroup, class T, int kVector, int kHeld>
constexpr void load_held(int lane, int vectors, const T* row, Vector<T, kVector> (&held)[kHeld]) {
  MEGASHARD_UNROLL
  for (int i = 0; i < kHeld; ++i) {
    if (lane + i * kGroup < vectors) held[i] = load<T, kVector>(row + (lane + i * kGroup) * kVector);
  }
}

constexpr float combined(float one, float other) { return one + other; }

/// Calls function(zero of the format's type): fp32, bf16 or fp16.
template <class Function>
void with_row_format(FloatFormat format, const Function& function) {
  if (format == FloatFormat::kFloat) {
    function(float{});
  } else if (format == FloatFormat::kBFloat16) {
    function(BFloat16Bits{});
  } else {
    function(HalfBits{});
  }
}

}  // namespace megashard::gpu
