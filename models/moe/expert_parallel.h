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

/// What a decoder is made of, with its experts on one rank or spread over several
/// (--expert-model-parallel-size N): rank r has the experts of EP rank r % N in every layer, under
/// their numbers in the whole model, and shards them over ranks that have the same. All other
/// parameters are sharded as without.
class ExpertParallelModule : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin {
 public:
  bool is_on_other_rank(const std::string& key) const override;
  ExpertParallelInfo expert_parallel_info() const override;

 protected:
  /// The losses of the routers, if the model has any. Collective over the ranks that share the sequences.
  std::vector<AuxTerm> router_terms(const LayerOutput& states, const SequenceShard& shard) const;
  void _init_ep_model() override;
  virtual const MoeConfig& moe_config() const = 0;
  virtual const BuildContext& context() const = 0;  ///< that the model was built with

 private:
  std::vector<SparseMoeBlock*> sparse_blocks() const;
  /// Parameters of this rank's experts.
  std::unordered_set<const c10::TensorImpl*> expert_parameters() const;

  ProcessGroupPtr ep_ranks_;
};

/// How many ranks share the rows of an expert's parameters, of world / ep_size that have it; the
/// others of these have replicas. `wanted` (expert_fully_shard_parallel_size) or, without it, as
/// many copies as the other parameters have, which `shard` ranks share. Throws one error for
/// sizes that do not fit.
int expert_shard_size(int world, int shard, int ep_size, std::optional<int> wanted);

}  // namespace megashard
