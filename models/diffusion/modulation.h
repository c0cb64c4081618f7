#pragma once

#include <ATen/core/Tensor.h>

#include "models/config/decoder_config.h"

namespace megashard {

/// Factors of a norm's output and what is added to it, fp32: [C], or [B, S, C] with S = 1, or S = 2 and `second`.
struct Modulation {
  at::Tensor factor, shift;
};

/// LayerNorm, or RMSNorm, of x [B, T, C] without parameters, times the factor, plus the shift: in fp32, and rounded
/// once to x's dtype. `second` [B, T] bool: patches that take the second of S = 2 modulations; undefined for S = 1.
/// Keeps no fp32 copy of x for backward. First derivatives only.
at::Tensor modulated_norm(const at::Tensor& x, const Modulation& modulation, const at::Tensor& second, double eps,
                          NormKind kind = NormKind::kLayerNorm);

/// residual + branch * gate, in fp32 and rounded once to the residual's dtype. gate fp32 [B, S, C]; see modulated_norm.
at::Tensor gated_sum(const at::Tensor& residual, const at::Tensor& branch, const at::Tensor& gate,
                     const at::Tensor& second);

}  // namespace megashard
