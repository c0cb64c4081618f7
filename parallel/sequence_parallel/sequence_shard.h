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

/// Ranks that pass keys and values on to each other (ring_attention.h): one of each place.
struct Ring {
  ProcessGroupPtr group;
  std::optional<c10::Stream> stream;  ///< of what travels, beside the compute; none on CPUs
};

/// A sequence whose rows lie on the ranks of a group. Without a ring: in rank order, ceil(length /
/// ranks) each, on the last ranks fewer, or none. With a ring of R places: the sequence is cut in 2 R
/// chunks, and place r has the chunks r and 2 R - 1 - r (zig-zag), so that a causal mask leaves every
/// place as much to do. The ranks of one place, which are neighbours, have equal parts of its rows.
struct SequenceShard {
  ProcessGroupPtr group{};             ///< null: this rank has the whole sequence
  int64_t length = 0;                  ///< of the whole sequence
  std::shared_ptr<const Ring> ring{};  ///< null: none
  ProcessGroupPtr place{};             ///< with a ring: the ranks of this rank's place; null: it is alone there

  bool is_whole() const { return group == nullptr || group->size() == 1; }
  SequenceShard with_length(int64_t tokens) const;
  /// Every sequence is a multiple of so many tokens long.
  int64_t length_multiple() const { return ring == nullptr ? 1 : 2 * int64_t{group->size()}; }
  int64_t max_rows() const;  ///< of any rank
  int64_t rows() const;      ///< of this rank
  /// A rank's rows, in the order in which it has them: one range or two.
  std::vector<RowRange> ranges_of(int rank) const;
  /// This rank's rows of dimension `dim`, a view where they are one range; a whole sequence is
  /// returned as it is.
  at::Tensor rows_of(const at::Tensor& whole, int64_t dim) const;

  /// What the ranks of this rank's place share, a sequence of the place's rows; without a ring the
  /// sequence itself.
  SequenceShard of_place() const;
};

/// Sequences of which `group`'s ranks share each: ring x per_place, as many as there are. A ring of
/// one place is none. `length` is yet to be set. Collective over the group; null: nobody shares.
SequenceShard share_sequences(const ProcessGroupPtr& group, int64_t ring);

/// The sum of a tensor over the shard's ranks, each of which uses it; so is its gradient.
at::Tensor sum_over_sequence(const at::Tensor& mine, const SequenceShard& shard);

/// Rows of all ranks, `mine` [..., rows(), ...] of each, as the whole sequence on every rank.
/// Without gradients. Collective.
at::Tensor whole_of_rows(const at::Tensor& mine, int64_t dim, const SequenceShard& shard);

}  // namespace megashard
