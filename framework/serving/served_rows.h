#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "framework/batch.h"
#include "framework/serving/message.h"

namespace megashard {

struct ServedRowsOptions {
  int64_t vocab_size = 0;
  int64_t seq_length = 0;  ///< most inputs of a sequence, or of a row with several
  int64_t length_multiple = 1;
  bool packs = false;  ///< several sequences in a row, by pack_sequences()
};

/// The sequences of a request, and where their tokens stand in a batch: all but the last one of each are inputs, and
/// entry t of a column of numbers is about token t + 1.
class ServedRows {
 public:
  /// `tokens` int64 [N], `lengths` int64 [sequences], which add up to N, and maybe `temperatures` float32 [N]. Throws
  /// c10::ValueError for others.
  ServedRows(const Message& request, const ServedRowsOptions& options);

  int64_t tokens() const { return tokens_.size(0); }
  /// On the CPU, as ConversationDataset makes one.
  Batch batch() const;
  /// The numbers of tokens, float32 [N], as a column of the batch, 0 for padding.
  at::Tensor in_batch(const at::Tensor& of_tokens) const;
  /// The column of a batch as numbers of tokens, 0 for the last one of each sequence.
  at::Tensor of_tokens(const at::Tensor& in_batch) const;

 private:
  /// Writes values[from], or values, to the places of the inputs; 0 elsewhere.
  at::Tensor placed(const at::Tensor& values, const at::Tensor& from) const;

  at::Tensor tokens_, temperatures_;
  at::Tensor inputs_;     // [inputs]: numbers of the tokens that are inputs
  at::Tensor places_;     // [inputs]: place of each in the flattened batch
  at::Tensor positions_;  // [inputs]: position of each in its sequence; undefined: a row is one sequence
  at::Tensor documents_;  // Batch::document_lengths
  int64_t rows_ = 0, length_ = 0;
};

}  // namespace megashard
