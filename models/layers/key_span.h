#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Packed documents in the rows of a batch; attention does not cross them.
struct Documents {
  std::vector<int64_t> lengths;  ///< of all rows, concatenated; each row starts a document
  int64_t longest = 0;           ///< maximum of the lengths
  at::Tensor ends;               ///< without ring on GPUs: [documents + 1] int32: 0, then the end of each in all rows
  at::Tensor begins;             ///< with a ring and on CPUs: [B, T] int64, the start of a token's document in its row

  /// From Batch::document_lengths, for `rows` rows of `length` tokens, which a ring shards. Does not block the host.
  /// Null without lengths; throws if they do not add up to the rows.
  static std::shared_ptr<const Documents> of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                             c10::Device device);
};

/// Keys that a layer's queries see: up to their own, of their document, within the window.
struct KeySpan {
  SequenceShard sequence{};                      // positions of the rows of [B, T]
  std::shared_ptr<const Documents> documents{};  // null: one per row
  int64_t window = 0;                            // number of keys including the query's own; 0: all
};

}  // namespace megashard
