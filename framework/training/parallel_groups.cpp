#include "framework/training/parallel_groups.h"

#include <vector>

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

}  // namespace megashard
