#pragma once

#include <cstdint>

/// The gated delta rule of delta_rule.h on a CPU, for one decay a head, by chunks whose matrices stay in the cache
/// (Gated DeltaNet, arXiv 2412.06464). Arithmetic is fp32. Key heads are distributed over LibTorch's intra-op threads;
/// AVX-512 or AVX2 is selected at run time. No checks: use gated_delta_rule.
namespace megashard::delta_kernels {

struct Shape {
  int64_t batch, length, key_heads, value_heads, key_dim, value_dim;
  const int64_t* begins;  ///< [batch, length]: first token of a token's document; null: 0
};

/// Inputs, or their gradients, as in DeltaRuleInputs; contiguous.
template <class T>
struct Arrays {
  T *q, *k, *v, *decay, *beta;
};

/// Floats of the states before each chunk, which forward writes for backward.
int64_t state_floats(const Shape& shape);
/// Scratch memory per thread, in floats.
int64_t scratch_floats(const Shape& shape);

/// out, grad_out: [batch, length, value_heads, value_dim], contiguous.
void forward(const Arrays<const float>& of, float* out, float* states, const Shape& shape, float* scratch);
void backward(const Arrays<const float>& of, const float* grad_out, const float* states, const Arrays<float>& grads,
              const Shape& shape, float* scratch);

}  // namespace megashard::delta_kernels
