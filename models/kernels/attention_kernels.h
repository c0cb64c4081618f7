#pragma once

#include <cstdint>

/// Flash attention on a CPU: blocks of scores in the cache, never all of them (FlashAttention-2). T is float,
/// c10::BFloat16 or c10::Half; arithmetic is fp32. Heads are split over LibTorch's intra-op threads; AVX-512 and AVX2
/// are picked at run time. No checks: fused_attention.h is the door.
namespace megashard::flash_attention {

/// Query t of a row sees the keys from max(key_begins[t], t - window + 1, 0) to t.
struct Shape {
  int64_t batch, length, heads, key_heads, head_dim;
  int64_t window;             ///< 0: no bound
  const int64_t* key_begins;  ///< [batch, length], rising in a row; null: 0
  float scale;                ///< of the scores
};

/// [batch, length, heads, head_dim]; the last dimension is dense.
template <class T>
struct Heads {
  T* data;
  int64_t stride_batch, stride_time, stride_head;  // elements
};

/// Floats of scratch memory that each thread needs.
int64_t forward_scratch(const Shape& shape);
int64_t backward_scratch(const Shape& shape);

/// lse [batch, heads, length]: the log-sum-exp of each query's scores. scratch [threads, forward_scratch()], at 64
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
