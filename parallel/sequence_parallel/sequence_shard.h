#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Rows [begin, begin + size) of a sequence.
struct RowRange {
  int64_t begin = 0, size = 0;
};

/// Ranks that pass keys and values around (ring_attention.h), one from each place.
struct Ring {
  ProcessGroupPtr group;
  std::optional<c10::Stream> stream;  ///< communication stream; unset on a CPU
};

/// Sequence whose rows are sharded over a group. Without a ring: in rank order, ceil(length / ranks) rows each; the
/// last ranks have fewer or none. With a ring of R places: the sequence is split into 2 R chunks, and place r has
/// chunks r and 2 R - 1 - r (zig-zag), which balances the work under a causal mask. The ranks of one place are
/// neighbours and have equal parts of its rows.
struct SequenceShard {
  ProcessGroupPtr group{};             ///< null: this rank has the whole sequence
  int64_t length = 0;                  ///< length of the whole sequence
  std::shared_ptr<const Ring> ring{};  ///< null: no ring
  ProcessGroupPtr place{};             ///< with a ring: the ranks of this rank's place; null: it is the only one

  bool is_whole() const { return group == nullptr || group->size() == 1; }
  SequenceShard with_length(int64_t tokens) const;
  /// Sequence lengths must be a multiple of this many tokens.
  int64_t length_multiple() const { return ring == nullptr ? 1 : 2 * int64_t{group->size()}; }
  int64_t max_rows() const;  ///< maximum over ranks
  int64_t rows() const;      ///< number of this rank's rows
  /// A rank's rows in its own order: one or two ranges.
  std::vector<RowRange> ranges_of(int rank) const;
  /// This rank's rows of dimension `dim`; a view if they are one range. Returns a whole sequence as it is.
  at::Tensor rows_of(const at::Tensor& whole, int64_t dim) const;

  /// Shard of the place's rows over the ranks of this rank's place; without a ring the shard itself.
  SequenceShard of_place() const;
};

/// Builds shards over `group`, whose size is ring x ranks per place. A ring of one place is no ring. Set `length`
/// afterwards. Collective over the group; null: no sharding.
SequenceShard share_sequences(const ProcessGroupPtr& group, int64_t ring);

/// All-reduce sum over the shard's ranks, each of which uses it; its gradient is summed, too.
at::Tensor sum_over_sequence(const at::Tensor& mine, const SequenceShard& shard);

/// Gathers rows of all ranks, [..., rows(), ...] each, into the whole sequence on every rank. Without gradients.
/// Collective.
at::Tensor whole_of_rows(const at::Tensor& mine, int64_t dim, const SequenceShard& shard);

}  // namespace megashard
