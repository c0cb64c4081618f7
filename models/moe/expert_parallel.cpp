#include "models/moe/expert_parallel.h"

#include <algorithm>

#include "models/moe/stacked_experts.h"
#include "parallel/collectives/device_mesh.h"

namespace megashard {

int expert_shard_size(int world, int shard, int parts, std::optional<int> wanted) {
  TORCH_CHECK(world % parts == 0, "--expert-model-parallel-size ", parts, " does not divide the ", world,
              " ranks; change one of them");
  const int holders = world / parts;
  if (wanted) {
    TORCH_CHECK(*wanted > 0 && holders % *wanted == 0, "expert_fully_shard_parallel_size is ", *wanted,
                ", which does not divide the ", holders, " ranks that have an expert (", world,
                " ranks / --expert-model-parallel-size ", parts, "); change one of them");
    return *wanted;
  }
  TORCH_CHECK(shard % parts == 0 || parts % shard == 0, "sharding_size ", shard, " and --expert-model-parallel-size ",
              parts,
              " have no multiple in common use: one must divide the other, or give expert_fully_shard_parallel_size in "
              "the FSDP2 file");
  return std::max(1, shard / parts);
}

bool ExpertParallelModule::is_elsewhere(const std::string& key) const {
  const auto expert = expert_of(key);
  return expert && *expert < moe_config().num_experts && !moe_config().has_expert(*expert);
}

std::unordered_set<const c10::TensorImpl*> ExpertParallelModule::expert_parameters() const {
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (const auto& layer : decoder_layers()) {
    if (!layer->experts()) continue;
    for (const auto& expert : layer->experts()->experts()) {
      for (const auto& parameter : expert->parameters()) parameters.insert(parameter.unsafeGetTensorImpl());
    }
  }
  return parameters;
}

PartsOfRanks ExpertParallelModule::parts_of_ranks() const {
  if (ranks_of_parts_ == nullptr) return {};
  return {.ranks = ranks_of_parts_, .parameters = expert_parameters()};
}

void ExpertParallelModule::_init_ep_model() {
  const auto parts = static_cast<int>(moe_config().parts);
  const auto& config = request().config;
  TORCH_CHECK(config.expert_parallel_size == 1 || config.expert_parallel_size == parts, "expert_parallel_size is ",
              config.expert_parallel_size, " in the FSDP2 file, and --expert-model-parallel-size ", parts,
              ": give the flag, and the same number or none in the file");
  if (parts == 1 && !config.expert_shard_size) return;
  const auto& world = request().process_group;
  const auto& dense = *options().mesh;
  const int shard = expert_shard_size(world->size(), dense.size(dense.ndim() - 1), parts, config.expert_shard_size);
  TORCH_CHECK(world->rank() % parts == moe_config().part, "the model has part ", moe_config().part, " of ", parts,
              " of the experts, which is not that of rank ", world->rank(), ": make it on this rank");
  const int replicas = world->size() / parts / shard;
  const DeviceMesh ranks(world, {replicas, shard, parts}, {"Expert_Replicate", "Expert_Shard", "EP"});
  if (parts > 1) ranks_of_parts_ = ranks.group("EP");
  for (const auto& layer : decoder_layers()) {
    if (layer->experts()) layer->experts()->set_ranks(ranks.group("EP"));
  }
  const auto mesh =
      replicas == 1 ? ranks.submesh({"Expert_Shard"}) : ranks.submesh({"Expert_Replicate", "Expert_Shard"});
  shard_over(mesh, [parameters = expert_parameters()](const at::Tensor& parameter) {
    return parameters.contains(parameter.unsafeGetTensorImpl());
  });
}

}  // namespace megashard
