#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

/// Row loops for the CPU that need one pass over memory where eager LibTorch needs four to eight. T is float,
/// c10::BFloat16 or c10::Half; arithmetic is fp32. Rows are distributed over LibTorch's intra-op threads; AVX-512 or
/// AVX2 is selected at run time. No checks: use fused_ops.h.
namespace megashard::kernels {

/// y = weight * (x / rms(x)), rounded to T before and after the multiplication by weight, as in transformers. x, y:
/// [rows, width]. With a branch [rows, width] it normalises x + branch, which is rounded to T and stored in sum; else
/// both are null.
template <class T>
void rms_norm(const T* x, const T* branch, T* sum, const T* weight, T* y, float* inverse_rms, int64_t rows,
              int64_t width, float eps);

/// Overwrites grad_weight, which may be null. x, grad_y, grad_x: [rows, width]; grad_weight: [width]. grad_sum [rows,
/// width] or null: added to grad_x, both rounded to T.
template <class T>
void rms_norm_backward(const T* grad_y, const T* x, const T* weight, const float* inverse_rms, const T* grad_sum,
                       T* grad_x, float* grad_weight, int64_t rows, int64_t width);

struct RotaryShape {
  int64_t batch, length, heads, head_dim;
  int64_t rotary_dim;  ///< rotated leading part of head_dim; even
  int64_t stride_batch, stride_time,
      stride_head;       ///< of x, in elements; its last dimension is dense
  bool table_per_batch;  ///< tables are [batch * length, rotary_dim / 2], else [length, ...]

  // Offset in x of a head of a token, b * length + t, and of its angles in the tables.
  int64_t place_of(int64_t token, int64_t head) const {
    return token / length * stride_batch + token % length * stride_time + head * stride_head;
  }
  int64_t angles_of(int64_t token) const { return (table_per_batch ? token : token % length) * (rotary_dim / 2); }
};
/// Strides of heads [batch, length, heads, head_dim], in elements; the last dimension is contiguous.
struct HeadStrides {
  int64_t batch, time, head;
};
/// y, with x's sizes: rotates pairs (i, i + rotary_dim / 2) by the angle, or back by it. y may be x.
template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* y, const RotaryShape& shape, const HeadStrides& of_y, bool back);

/// y = silu(gate) * up. y and grad_y [rows, width] are contiguous; rows of the others start `stride` elements apart.
/// Backward recomputes y unless it is null; y may be grad_y.
template <class T>
void swiglu(const T* gate, const T* up, T* y, int64_t rows, int64_t width, int64_t stride);
template <class T>
void swiglu_backward(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, T* y, int64_t rows,
                     int64_t width, int64_t stride);

/// loss[i] = log(sum(exp(logits[i]))) - logits[i][labels[i]], 0 where labels[i] < 0.
/// stats [rows, 2]: the row's largest logit and log(sum(exp(logit - largest))).
template <class T>
void cross_entropy(const T* logits, const int64_t* labels, float* loss, float* stats, int64_t rows, int64_t width);
/// Overwrites logits by their gradient: 0 if labels[i] == ignore_index. Other labels < 0 belong to another rank's
/// logits.
template <class T>
void cross_entropy_backward_(T* logits, const int64_t* labels, const float* stats, const float* grad_loss, int64_t rows,
                             int64_t width, int64_t ignore_index);

/// The causal convolution of causal_conv.h. Tokens are numbered over the batch.
struct ConvShape {
  int64_t batch, length, channels, taps;
  int64_t stride_batch, stride_time;  ///< of x, in elements; its last dimension is dense
  const int64_t* begins;              ///< [batch, length]: first token of a token's document; null: 0

  int64_t place_of(int64_t token) const { return token / length * stride_batch + token % length * stride_time; }
  /// How many tokens a token sees: itself and earlier ones.
  int64_t seen_by(int64_t token) const {
    return std::min(taps, token % length - (begins == nullptr ? 0 : begins[token]) + 1);
  }
  /// How many tokens see a token: itself and later ones.
  int64_t that_see(int64_t token) const {
    int64_t count = 1;
    while (count < taps && token % length + count < length && seen_by(token + count) > count) ++count;
    return count;
  }
};
/// y [batch, length, channels], contiguous; row d of taps [taps, channels] multiplies the token d before.
void causal_conv(const float* x, const float* taps, float* y, const ConvShape& shape);
/// grad_y and grad_x are contiguous; overwrites grad_taps.
void causal_conv_backward(const float* grad_y, const float* x, const float* taps, float* grad_x, float* grad_taps,
                          const ConvShape& shape);

}  // namespace megashard::kernels
