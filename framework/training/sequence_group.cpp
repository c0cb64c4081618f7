#include "framework/training/sequence_group.h"

#include <numeric>

#include "framework/mistakes.h"

namespace megashard {

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
