#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

/// How a token is drawn from logits. The names and the order of the cuts are transformers'.
struct SamplingOptions {
  double temperature = 1;  ///< divides the logits; 0: the likeliest token
  int64_t top_k = 0;       ///< only so many of the likeliest tokens, with those as likely as the last; 0: all
  double top_p = 1;        ///< only the fewest of the likeliest tokens whose probabilities exceed it; 1: all
};

struct SampledTokens {
  at::Tensor tokens;     ///< [B] int64
  at::Tensor log_probs;  ///< [B] fp32: log softmax(logits / temperature) of them, of all tokens; of logits for 0
};

/// Logits / temperature [B, V], in which tokens that are cut off have -infinity.
at::Tensor cut_scores(const at::Tensor& scores, const SamplingOptions& options);

/// The token of each row of `logits` [B, V] where the probabilities' sum exceeds `uniform` [B] fp64 from [0, 1), which
/// a temperature of 0 does not read.
SampledTokens sample_tokens(const at::Tensor& logits, const at::Tensor& uniform, const SamplingOptions& options);

/// A text among all, for its random numbers: they depend on nothing else.
struct TextNumber {
  int64_t prompt = 0, sample = 0;
};

/// A number from [0, 1) for the token at `place` of the text (Philox).
double uniform_number(int64_t seed, const TextNumber& text, int64_t place);

}  // namespace megashard
