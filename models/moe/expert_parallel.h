#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/layers/decoder_layer.h"

namespace megashard {

/// What a decoder is made of, with its experts on one rank or spread over several
/// (--expert-model-parallel-size N): rank r has part r % N of every layer's experts, under their
/// numbers in the whole model, and shards them over ranks that have the same part. All other
/// parameters are sharded as without.
class ExpertParallelModule : public MultiModalModule, public FSDP2Mixin, public WeightInitMixin {
 public:
  bool is_elsewhere(const std::string& key) const override;
  PartsOfRanks parts_of_ranks() const override;

 protected:
  void _init_ep_model() override;
  virtual const MoeConfig& moe_config() const = 0;
  virtual const std::vector<std::shared_ptr<Hooked<DecoderLayer>>>& decoder_layers() const = 0;

 private:
  /// Of this rank's experts.
  std::unordered_set<const c10::TensorImpl*> expert_parameters() const;

  ProcessGroupPtr ranks_of_parts_;
};

/// How many ranks share the rows of an expert's parameters, of world / parts that have it; the
/// others of these have replicas. `wanted` (expert_fully_shard_parallel_size) or, without it, as
/// many copies as the other parameters have, which `shard` ranks share. Throws one sentence for
/// sizes that do not fit.
int expert_shard_size(int world, int shard, int parts, std::optional<int> wanted);

}  // namespace megashard
