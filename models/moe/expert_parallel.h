#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/moe/moe.h"

namespace megashard {

/// Base of decoders, with expert parallelism (--expert-model-parallel-size N): rank r has the experts of EP rank r % N
/// in every layer, a piece of the whole model's tensors, and shards them over the ranks that have the same experts.
/// Other parameters are sharded as without it.
class ExpertParallelModule : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin {
 public:
  bool is_stack_of_matrices(const std::string& name) const override;

 protected:
  /// Router losses, if the model has routers. Collective over the ranks that share the sequences.
  std::vector<AuxTerm> router_terms(const LayerOutput& states, const SequenceShard& shard) const;
  void _init_ep_model() override;
  std::unordered_set<const c10::TensorImpl*> stacked_parameters() const override;
  virtual const MoeConfig& moe_config() const = 0;
  virtual const BuildContext& context() const = 0;  ///< that the model was built with

 private:
  std::vector<SparseMoeBlock*> sparse_blocks() const;
};

/// Number of ranks that an expert's parameters are sharded over. Of the world / ep_size ranks that have the expert, the
/// others hold replicas. Returns `wanted` (expert_fully_shard_parallel_size) if set; else keeps as many replicas as the
/// other parameters have, which are sharded over `shard` ranks. Throws one error for sizes that do not fit.
int expert_shard_size(int world, int shard, int ep_size, std::optional<int> wanted);

}  // namespace megashard
