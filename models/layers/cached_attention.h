#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/layers/causal_attention.h"

namespace megashard {

/// Keys and values of a KeyCache, and which of them later tokens see: each those up to its own place.
struct CachedKeys {
  at::Tensor keys, values;  ///< [B, N, G, D], [B, N, G, V]: of the places 0 .. N - 1
  at::Tensor places;        ///< [B, T] int64: of the queries' tokens
  int64_t window = 0;       ///< its own key and the window - 1 before it; 0: all
  int64_t chunk = 0;        ///< only those from the last multiple of it on; 0: all
};

/// causal_attention() of q [B, T, H, D] over cached keys, G a divisor of H -> [B, T, H, V]. Scores and weights are fp32
/// for 16-bit heads. Without dropout.
at::Tensor cached_attention(const at::Tensor& q, const CachedKeys& cached, const AttentionOptions& options);

}  // namespace megashard
