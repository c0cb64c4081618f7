#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "models/layers/pass.h"

namespace megashard {

/// Whole sequences for mixers whose state passes through all tokens: the ranks that share a sequence exchange its rows
/// for some of the heads, or channels (Ulysses). One rank has all of both.
class WholeSequence {
 public:
  explicit WholeSequence(const Pass& pass);

  /// rows[i] [B, own tokens, H_i, D_i] -> [B, T, H_i / ranks, D_i]; every H_i is a multiple of the ranks.
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& rows) const;
  /// The inverse, of one tensor.
  at::Tensor scatter(const at::Tensor& heads) const;
  /// Parameters [H, ...] of all heads -> those of this rank's.
  at::Tensor of_rank(const at::Tensor& parameters) const;
  /// [B, T] int64: the first token of each token's document, for a gathered tensor; undefined: one document in a row.
  at::Tensor begins(const at::Tensor& gathered) const;

 private:
  SequenceShard rows_;
  std::shared_ptr<const Documents> documents_;
};

}  // namespace megashard
