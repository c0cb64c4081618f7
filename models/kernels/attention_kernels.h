#pragma once

#include <cstdint>

/// Flash attention on a CPU: blocks of scores in the cache (FlashAttention-2). T is float, c10::BFloat16 or c10::Half;
/// arithmetic is fp32. Heads are distributed over LibTorch's intra-op threads; AVX-512 or AVX2 is selected at run time.
/// No checks: use models/layers/attention.h.
namespace megashard::flash_attention {

/// Query t of a row sees the keys from max(key_begins[t], t - window + 1, 0) to key_ends[t] - 1.
struct Shape {
  int64_t batch, length, heads, key_heads, head_dim;
  int64_t window;             ///< 0: unlimited
  const int64_t* key_begins;  ///< [batch, length], non-decreasing in a row; null: 0
  const int64_t* key_ends;    ///< the same, and more than t; null: t + 1
  float scale;                ///< factor of the scores
};

/// [batch, length, heads, head_dim]; the last dimension is contiguous.
template <class T>
struct Heads {
  T* data;
  int64_t stride_batch, stride_time, stride_head;  // elements
};

/// Scratch memory per thread, in floats.
int64_t forward_scratch(const Shape& shape);
int64_t backward_scratch(const Shape& shape);

/// lse [batch, heads, length]: log-sum-exp of each query's scores. scratch [threads, forward_scratch()], aligned to 64
/// bytes.
template <class T>
void forward(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, float* lse, const Shape& shape, float* scratch);

template <class T>
struct Gradients {
  Heads<T> q, k, v;
};
/// scratch [threads, backward_scratch()].
template <class T>
void backward(Heads<T> grad_out, Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, const float* lse,
              const Gradients<T>& grads, const Shape& shape, float* scratch);

}  // namespace megashard::flash_attention
