#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megashard {

// Pieces of kernels that pass a state through a sequence: within a chunk of tokens they work by matrix products, and
// from chunk to chunk they pass the state.

inline constexpr int64_t kChunk = 64;  ///< tokens; transformers' and FLA's

/// Brings rows into chunks, with `behind` behind the last token.
class Chunks {
 public:
  explicit Chunks(int64_t length) : length_(length), count_((length + kChunk - 1) / kChunk) {}

  int64_t count() const { return count_; }
  /// [B, T, ...] -> [B, N, chunk, ...]
  at::Tensor of(const at::Tensor& rows, double behind = 0) const;
  /// [B, T, H, ...] -> [B, groups, H / groups, N, chunk, ...]
  at::Tensor of_heads(const at::Tensor& rows, int64_t groups) const;
  /// The first token of each token's document, for Decays; undefined if `begins` [B, T] is.
  at::Tensor of_begins(const at::Tensor& begins) const;

 private:
  int64_t length_, count_;
};

/// Factors e^(sum of decays) between the tokens of a chunk, and from and to its ends; 0 between documents. A token has
/// one decay (D = 1), or one for each of D channels.
class Decays {
 public:
  at::Tensor from_begin;  ///< [..., N, chunk, D]
  at::Tensor to_end;      ///< [..., N, chunk, D]
  at::Tensor through;     ///< [..., N, D, 1]

  /// of_tokens [B, G, r, N, chunk, D]; begins [B, N, chunk] or undefined
  Decays(const at::Tensor& of_tokens, const at::Tensor& begins);

  /// [..., N, chunk, chunk]: of token i >= j the products, summed over channels, x_i k_j e^(sum of decays from j to i).
  /// x and k [..., N, chunk, channels].
  at::Tensor products(const at::Tensor& x, const at::Tensor& k) const;

 private:
  at::Tensor by_channel(const at::Tensor& x, const at::Tensor& k) const;

  at::Tensor sums_;       // [..., N, chunk, D]: of the decays up to each token, with its own
  at::Tensor forbidden_;  // [..., chunk, chunk] bool: pairs whose product is 0
  at::Tensor within_;     // [..., N, chunk, chunk], D = 1 only: from token j to token i >= j
};

}  // namespace megashard
