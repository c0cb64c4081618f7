#pragma once

#include <ATen/core/Tensor.h>

namespace megashard {

/// Inputs of Mamba-2's scan, fp32; H a multiple of G: head h has the b and c of group h / (H / G).
struct StateSpaceInputs {
  at::Tensor x;       ///< [B, T, H, P]
  at::Tensor step;    ///< [B, T, H]: delta, not negative
  at::Tensor rate;    ///< [H]: A, negative: the state decays by e^(step rate)
  at::Tensor b, c;    ///< [B, T, G, N]
  at::Tensor begins;  ///< [B, T] int64: first token of a token's document; undefined: 0
};

/// Mamba-2's scan (transformers' mamba2_chunk_scan without D). Each head has a state S [N, P], zero before a document;
/// a token does S <- e^(step rate) S + b (step x)^T, and its result is S^T c. Returns [B, T, H, P]. Computes
/// chunks of tokens, each as attention without a softmax (state space duality).
at::Tensor state_space_scan(const StateSpaceInputs& inputs);

}  // namespace megashard
