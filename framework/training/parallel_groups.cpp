#include "framework/training/parallel_groups.h"

#include <numeric>
#include <vector>

#include "framework/mistakes.h"

namespace megashard {

ParallelGroups::ParallelGroups(const Arguments& arguments, const ProcessGroupPtr& all) : ParallelGroups(all) {
  const auto pieces = static_cast<int>(arguments.tensor_model_parallel_size);
  if (pieces == 1) return;
  const int first = all->rank() / pieces * pieces;
  std::vector<int> neighbours, alike;
  for (int rank = 0; rank < all->size(); ++rank) {
    if (rank / pieces * pieces == first) neighbours.push_back(rank);
    if (rank % pieces == all->rank() % pieces) alike.push_back(rank);
  }
  tensor_parallel = all->split(neighbours, "tensor_parallel");
  sharding = all->split(alike, "sharding");
}

SequenceShard sequence_ranks(const Arguments& arguments, const MultiModalModule& model, const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return {};
  const int64_t ring = arguments.ring_size(), sharing_heads = ranks / ring;
  if (sharing_heads > 1) value_errors_are_mistakes([&] { model.check_sequence_ranks(sharing_heads); });
  if (ring > 1) model.check_sequence_ring();
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), group->rank() / ranks * ranks);
  return share_sequences(group->split(members, "context_parallel"), ring);
}

ProcessGroupPtr data_parallel_group(const Arguments& arguments, const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return group;
  std::vector<int> members;
  for (int rank = group->rank() % ranks; rank < group->size(); rank += ranks) members.push_back(rank);
  return group->split(members, "data_parallel");
}

}  // namespace megashard
