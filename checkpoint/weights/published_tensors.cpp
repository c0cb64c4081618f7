#include "checkpoint/weights/published_tensors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>

#include "parallel/collectives/process_group.h"

namespace megashard {
namespace {

/// True if the form permutes the tensor, so that its rows are no rows in the files.
bool is_permuted(const StoredForm& form, const std::string& tensor) {
  return std::ranges::any_of(
      form.parts, [&](const WeightPart& part) { return part.tensor == tensor && !part.permutation.empty(); });
}

/// True if FSDP has cut slices of dimension 0, on all of its ranks then.
bool cuts_slices(const ShardedTensor& shard) {
  for (const auto& placement : shard.placements) {
    if (placement.kind != Placement::Kind::kReplicate && placement.dim != 0) return false;  // tensor parallelism does
  }
  if (shard.local.numel() == 0) return false;
  for (int64_t dim = 1; dim < shard.local.dim(); ++dim) {
    if (shard.local.size(dim) != shard.global_sizes[static_cast<size_t>(dim)]) return true;
  }
  return false;
}

/// Gathers the slices that the ranks of FSDP share in equal parts, and keeps some of them, on the host. Collective over
/// these ranks.
ShardedTensor with_whole_slices(ShardedTensor shard) {
  const auto ranks = sharding_groups(shard).front();  // FSDP's; later groups have other slices
  const auto mine = shard.local.detach().contiguous();
  auto sizes = shard.global_sizes;
  const int64_t slice = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  sizes[0] = mine.numel() * ranks->size() / slice;
  const auto all = at::empty(sizes, mine.options());
  ranks->all_gather_into(all.view({-1}), mine.view({-1})).wait();
  const auto begin_of = [&](int64_t rank) { return sizes[0] * rank / ranks->size(); };
  const int64_t begin = begin_of(ranks->rank()), end = begin_of(ranks->rank() + 1);
  std::ranges::fill(shard.offsets.begin() + 1, shard.offsets.end(), 0);
  shard.offsets[0] = shard.offsets[0] / sizes[0] * sizes[0] + begin;
  shard.local = all.narrow(0, begin, end - begin).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  return shard;
}

}  // namespace

ShardedTensors published_tensors(const ShardedTensors& tensors, const WeightMap& map) {
  ShardedTensors published;
  for (const auto& [name, shard] : tensors) {
    const auto* group = map.group_of(name);
    if (group == nullptr) {
      published.emplace_back(name, shard);
      continue;
    }
    const auto& form = group->forms.front();
    const bool gathers = is_permuted(form, name) && cuts_slices(shard);
    std::ranges::move(stored_pieces(form, name, gathers ? with_whole_slices(shard) : shard),
                      std::back_inserter(published));
  }
  return published;
}

}  // namespace megashard
