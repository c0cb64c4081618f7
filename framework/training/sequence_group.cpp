#include "framework/training/sequence_group.h"

#include <numeric>

namespace megashard {

ProcessGroupPtr sequence_group(const Arguments& arguments, const MultiModalModule& model,
                               const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return nullptr;
  model.check_sequence_ranks(ranks);
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), group->rank() / ranks * ranks);
  return group->subgroup(members, "context_parallel");
}

ProcessGroupPtr data_parallel_group(const Arguments& arguments, const ProcessGroupPtr& group) {
  const auto ranks = static_cast<int>(arguments.context_parallel_size);
  if (ranks == 1) return group;
  std::vector<int> members;
  for (int rank = group->rank() % ranks; rank < group->size(); rank += ranks)
    members.push_back(rank);
  return group->subgroup(members, "data_parallel");
}

}  // namespace megashard
