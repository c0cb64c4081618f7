#include "parallel/sequence_parallel/sequence_shard.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "parallel/tensor_parallel/tensor_parallel_regions.h"

namespace megashard {
namespace {

/// The two chunks of a ring's place.
std::vector<RowRange> chunks_of_place(const SequenceShard& shard, int64_t place) {
  const int64_t chunks = 2 * int64_t{shard.ring->group->size()};
  const int64_t size = shard.length / chunks;
  TORCH_CHECK(shard.length % shard.length_multiple() == 0, "a sequence of ", shard.length, " tokens cannot lie on ",
              shard.group->size(), " ranks in a ring: choose a length that is a multiple of ", shard.length_multiple(),
              ", twice as many");
  return {{place * size, size}, {(chunks - 1 - place) * size, size}};
}

/// Rows [begin, begin + size) of the concatenated ranges.
std::vector<RowRange> part_of_ranges(const std::vector<RowRange>& ranges, int64_t begin, int64_t size) {
  std::vector<RowRange> part;
  int64_t before = 0;
  for (const auto& range : ranges) {
    const int64_t first = std::max(begin, before), last = std::min(begin + size, before + range.size);
    if (first < last) part.push_back({range.begin + first - before, last - first});
    before += range.size;
  }
  return part;
}

at::Tensor rows_in(const at::Tensor& whole, int64_t dim, const std::vector<RowRange>& ranges) {
  std::vector<at::Tensor> parts;
  for (const auto& range : ranges) parts.push_back(whole.narrow(dim, range.begin, range.size));
  return parts.size() == 1 ? parts.front() : at::cat(parts, dim);
}

}  // namespace

SequenceShard SequenceShard::with_length(int64_t tokens) const {
  SequenceShard shard = *this;
  shard.length = tokens;
  return shard;
}

int64_t SequenceShard::max_rows() const { return is_whole() ? length : (length + group->size() - 1) / group->size(); }

int64_t SequenceShard::rows() const {
  if (is_whole()) return length;
  return std::clamp<int64_t>(length - group->rank() * max_rows(), 0, max_rows());
}

std::vector<RowRange> SequenceShard::ranges_of(int rank) const {
  if (is_whole()) return {{0, length}};
  if (ring == nullptr) {
    const int64_t begin = std::min(length, rank * max_rows());
    return {{begin, std::min(length - begin, max_rows())}};
  }
  const int per_place = place == nullptr ? 1 : place->size();
  return part_of_ranges(chunks_of_place(*this, rank / per_place), rank % per_place * max_rows(), max_rows());
}

at::Tensor SequenceShard::rows_of(const at::Tensor& whole, int64_t dim) const {
  if (is_whole() || !whole.defined()) return whole;
  return rows_in(whole, dim, ranges_of(group->rank()));
}

SequenceShard SequenceShard::of_place() const {
  if (ring == nullptr) return *this;
  return {.group = place, .length = length / ring->group->size()};
}

SequenceShard share_sequences(const ProcessGroupPtr& group, int64_t ring) {
  SequenceShard shard{.group = group};
  if (group == nullptr || ring == 1) return shard;
  TORCH_CHECK(ring >= 1 && group->size() % ring == 0, "a ring of ", ring, " places does not divide the ", group->size(),
              " ranks of a sequence");
  const int per_place = group->size() / static_cast<int>(ring);
  std::vector<int> in_ring;
  for (int rank = group->rank() % per_place; rank < group->size(); rank += per_place) in_ring.push_back(rank);
  Ring ranks{.group = group->split(in_ring, "ring"), .stream = std::nullopt};
  const c10::Device device = ranks.group->device();
  if (device.is_cuda())
    ranks.stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  shard.ring = std::make_shared<const Ring>(std::move(ranks));
  if (per_place == 1) return shard;
  std::vector<int> neighbours(static_cast<size_t>(per_place));
  std::iota(neighbours.begin(), neighbours.end(), group->rank() / per_place * per_place);
  shard.place = group->split(neighbours, "place");
  return shard;
}

at::Tensor sum_over_sequence(const at::Tensor& mine, const SequenceShard& shard) {
  if (shard.is_whole()) return mine;
  return copy_to_tensor_parallel_region(reduce_from_tensor_parallel_region(mine, shard.group), shard.group);
}

at::Tensor whole_of_rows(const at::Tensor& mine, int64_t dim, const SequenceShard& shard) {
  if (shard.is_whole()) return mine;
  const int64_t ranks = shard.group->size();
  const at::Tensor rows_first = mine.detach().transpose(0, dim);
  auto sizes = rows_first.sizes().vec();
  sizes[0] = shard.max_rows();
  const at::Tensor sent = at::empty(sizes, mine.options());  // missing rows stay uninitialised and are never read
  sent.narrow(0, 0, rows_first.size(0)).copy_(rows_first);
  sizes[0] = ranks * shard.max_rows();
  const at::Tensor all = at::empty(sizes, mine.options());
  shard.group->all_gather_into(all.view({-1}), sent.view({-1})).wait();
  sizes[0] = shard.length;
  const at::Tensor whole = at::empty(sizes, mine.options());
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t row = rank * shard.max_rows();
    for (const auto& range : shard.ranges_of(rank)) {
      whole.narrow(0, range.begin, range.size).copy_(all.narrow(0, row, range.size));
      row += range.size;
    }
  }
  return whole.transpose(0, dim);
}

}  // namespace megashard
