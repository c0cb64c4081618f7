#pragma once

#include <ATen/core/Tensor.h>

#include "framework/batch.h"

namespace megashard {

/// Columns that the trainer adds for an objective that names kLabelCounts. A sequence is a row, or a conversation of
/// packed rows.
inline constexpr const char* kLabelCounts = "label_counts";  ///< [sequences] float32: sum of each one's loss_mask
inline constexpr const char* kSequenceIds = "sequence_ids";  ///< [B, T] int64; `sequences` for padding; of packed rows

/// Adds them to a batch on the host with whole sequences.
void add_sequences(Batch& batch);

/// Sums over the sequences of a batch, whole ones where ranks share them.
class Sequences {
 public:
  explicit Sequences(const Batch& batch) : batch_(batch) {}

  /// [sequences] sums of x [B, T], this rank's tokens, over all of each sequence's; with gradients.
  at::Tensor sums(const at::Tensor& x) const;
  /// For each token its sequence's value, of [sequences]: broadcasts to [B, T].
  at::Tensor of_tokens(const at::Tensor& of_sequences) const;
  /// [sequences] fp32: how many labels each one has.
  const at::Tensor& label_counts() const { return batch_.at(kLabelCounts); }
  /// How many ranks have each of the sums.
  int ranks() const { return batch_.sequence.is_whole() ? 1 : batch_.sequence.group->size(); }

 private:
  const Batch& batch_;
};

}  // namespace megashard
