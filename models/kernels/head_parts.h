#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "models/kernels/fused_operators.h"
#include "parallel/collectives/process_group.h"

/// For losses of a language model's head that compute its logits in parts (cross_entropy.cpp, head_outputs.cpp).
namespace megashard {

/// Logits that are converted to fp32 at a time without a kernel.
inline constexpr int64_t kWidenedAtOnce = int64_t{1} << 25;
/// A label in the vocabulary shard of another rank.
inline constexpr int64_t kLabelOfOtherRank = -1;

/// Number of rows of [rows, width] with at most `elements` elements, but at least one.
inline int64_t rows_of(int64_t elements, int64_t width) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, width));
}

/// Calls body(first, count) for parts of the rows.
template <class Body>
void for_rows(int64_t rows, int64_t at_once, const Body& body) {
  for (int64_t row = 0; row < rows; row += at_once) body(row, std::min(at_once, rows - row));
}

/// Rows per part: few parts of similar size, of multiples of 128 rows if possible.
int64_t rows_of_part(int64_t rows, int64_t most);

using LossAndStats = FusedOperators::TwoTensors;  // [rows] fp32; as many rows of statistics for the gradient

/// Labels as [tokens], after checks.
at::Tensor flat_labels(const at::Tensor& labels, int64_t vocabulary);
/// Labels relative to this rank's shard of the vocabulary.
at::Tensor labels_of_piece(const at::Tensor& labels, int64_t width, const ProcessGroupPtr& ranks);
/// Losses of logits [rows, width]; `labels` are relative to this rank's shard.
LossAndStats losses_of(const at::Tensor& logits, const at::Tensor& labels, const ProcessGroupPtr& ranks);
/// The logarithm of the sum of all exponentials, [rows], from the statistics.
at::Tensor log_sums(const at::Tensor& stats);

/// Computes gradients of hidden states for parts of the rows, and accumulates the weight's.
class HeadGradients {
 public:
  /// Gradients that are not requested are undefined.
  HeadGradients(const at::Tensor& hidden, const at::Tensor& weight, bool of_hidden, bool of_weight);

  void add(const at::Tensor& grad_logits, const at::Tensor& hidden, int64_t row);
  const at::Tensor& of_hidden() const { return grad_hidden_; }
  at::Tensor of_weight() const;

 private:
  at::Tensor operand(const at::Tensor& x) const { return widens_ ? x.to(at::kFloat) : x; }

  at::Tensor weight_, grad_hidden_, grad_weight_;
  bool widens_, of_weight_;
};

}  // namespace megashard
