#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/sequence_parallel/sequence_shard.h"

namespace megashard {

/// Documents that stand one behind the other in the rows of a batch, and see nothing of each other.
struct Documents {
  std::vector<int64_t> lengths;  ///< of all rows one behind the other; each row begins a document
  int64_t longest = 0;           ///< of the lengths
  at::Tensor ends;               ///< elsewhere [documents + 1] int32: 0, then where each ends in all rows
  at::Tensor begins;             ///< in a ring and on CPUs [B, T] int64: where a token's document begins in its row

  /// From Batch::document_lengths, for `rows` rows of `length` tokens, of which a ring has parts; the host waits for
  /// nothing. Null without lengths; throws where they are not those of the rows.
  static std::shared_ptr<const Documents> of(const at::Tensor& lengths, int64_t rows, int64_t length, bool in_ring,
                                             c10::Device device);
};

/// Which keys a layer's queries see: of those up to their own, the ones of their document within the window.
struct KeySpan {
  SequenceShard sequence{};                      // where the rows of [B, T] are
  std::shared_ptr<const Documents> documents{};  // null: each row is one
  int64_t window = 0;                            // a query's own key and the window - 1 before it; 0: all
};

}  // namespace megashard
