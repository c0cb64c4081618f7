#include "models/moe/expert_parallel.h"

#include <ATen/TensorOperators.h>

#include <algorithm>

#include "models/moe/router_losses.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

int expert_shard_size(int world, int shard, int ep_size, std::optional<int> wanted) {
  TORCH_CHECK(world % ep_size == 0, "--expert-model-parallel-size ", ep_size, " does not divide the ", world,
              " ranks; change one of them");
  const int holders = world / ep_size;
  if (wanted) {
    TORCH_CHECK(*wanted > 0 && holders % *wanted == 0, "expert_fully_shard_parallel_size is ", *wanted,
                ", which does not divide the ", holders, " ranks that have an expert (", world,
                " ranks / --expert-model-parallel-size ", ep_size, "); change one of them");
    return *wanted;
  }
  TORCH_CHECK(shard % ep_size == 0 || ep_size % shard == 0, "sharding_size ", shard,
              " and --expert-model-parallel-size ", ep_size,
              " have no multiple in common use: one must divide the other, or give expert_fully_shard_parallel_size in "
              "the FSDP2 file");
  return std::max(1, shard / ep_size);
}

bool ExpertParallelModule::is_stack_of_matrices(const std::string& name) const {
  const auto parameters = named_parameters();
  const auto* found = parameters.find(name);
  return found != nullptr && stacked_parameters().contains(found->unsafeGetTensorImpl());
}

std::vector<AuxTerm> ExpertParallelModule::router_terms(const LayerOutput& states, const SequenceShard& shard) const {
  if (!states.balance.defined()) return {};
  const auto z = states.z.defined() ? sum_over_sequence(states.z, shard) : at::Tensor();
  return router_losses({.hidden = {}, .balance = sum_over_sequence(states.balance, shard), .z = z}, moe_config());
}

std::vector<SparseMoeBlock*> ExpertParallelModule::sparse_blocks() const {
  std::vector<SparseMoeBlock*> blocks;
  for (const auto& each : modules(/*include_self=*/false)) {
    if (auto* block = dynamic_cast<SparseMoeBlock*>(each.get())) blocks.push_back(block);
  }
  return blocks;
}

std::unordered_set<const c10::TensorImpl*> ExpertParallelModule::stacked_parameters() const {
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (auto* block : sparse_blocks()) {
    for (const auto& parameter : block->experts().parameters()) parameters.insert(parameter.unsafeGetTensorImpl());
  }
  return parameters;
}

void ExpertParallelModule::_init_ep_model() {
  const auto ep_size = static_cast<int>(context().experts.ranks);
  const auto& config = request().config;
  TORCH_CHECK(config.expert_parallel_size == 1 || config.expert_parallel_size == ep_size, "expert_parallel_size is ",
              config.expert_parallel_size, " in the FSDP2 file, and --expert-model-parallel-size ", ep_size,
              ": give the flag, and the same number or none in the file");
  if (ep_size == 1 && !config.expert_shard_size) return;
  const auto& world = request().process_group;  // without other tensor-parallel pieces
  const auto& dense = *options().mesh;
  const int shard = expert_shard_size(world->size(), dense.size(dense.ndim() - 1), ep_size, config.expert_shard_size);
  TORCH_CHECK(world->rank() % ep_size == context().experts.rank, "the model has part ", context().experts.rank, " of ",
              ep_size, " of the experts, which is not that of rank ", world->rank(), ": make it on this rank");
  const int replicas = world->size() / ep_size / shard;
  const DeviceMesh ranks(world, {replicas, shard, ep_size}, {"Expert_Replicate", "Expert_Shard", "EP"});
  const auto ep = ranks.submesh({"EP"});
  for (auto* block : sparse_blocks()) {
    block->set_ranks(ep->group(0));
    for (const auto& parameter : block->experts().parameters()) set_tensor_parallel(parameter, ep, Placement::shard(0));
  }
  const auto mesh =
      replicas == 1 ? ranks.submesh({"Expert_Shard"}) : ranks.submesh({"Expert_Replicate", "Expert_Shard"});
  shard_over(mesh, [parameters = stacked_parameters()](const at::Tensor& parameter) {
    return parameters.contains(parameter.unsafeGetTensorImpl());
  });
}

}  // namespace megashard
