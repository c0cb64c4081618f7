#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/layers/mlp.h"
#include "models/layers/part.h"
#include "models/moe/expert_exchange.h"
#include "models/moe/grouped_experts.h"
#include "models/moe/router.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// A mixture of experts as a part of a layer.
struct MoeSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t hidden_size = 0;
  MoeConfig moe{};
  MlpSpec expert{};
  RouterSpecPtr router{};
};

PartSpecPtr experts_part(MoeSpec spec);

/// Takes the place of another rank's expert in the list. Draws the numbers of that expert's initial weights, so that
/// all experts start as on one rank.
class RemoteExpert : public torch::nn::Module, public SelfInitializing {
 public:
  RemoteExpert(const MlpSpec& spec, const BuildContext& context) : spec_(spec), context_(context) {}
  /// A new expert without values, for its initialisation.
  std::shared_ptr<Hooked<Mlp>> expert() const;
  void init_own_weights(const WeightInit& init) override;

 private:
  MlpSpec spec_;
  BuildContext context_;
};

/// Router `gate` and the list `experts`. Rows are sorted by expert once; GroupedExperts computes them, and the weighted
/// sum of a token's results takes its place. Every expert runs, also on no rows: its gradients are zeros then, and as a
/// unit of fully_shard it joins the collectives of the ranks that have rows for it. With expert parallelism rows travel
/// to the ranks of their experts, and results come back; on a GPU this blocks the host once per forward.
class SparseMoeBlock : public torch::nn::Module {
 public:
  SparseMoeBlock(const MoeSpec& spec, const BuildContext& context);

  LayerOutput forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C]
  std::string class_name() const { return class_name_; }

  /// Sets the ranks that share the experts, in the order of their experts. Call it before the first forward.
  void set_ranks(ProcessGroupPtr ranks) { ranks_ = std::move(ranks); }
  /// This rank's.
  const std::vector<std::shared_ptr<Hooked<Mlp>>>& experts() const { return experts_; }

 private:
  /// Rows sorted by expert -> their results.
  at::Tensor run_experts(const at::Tensor& rows, const RowGroupsPtr& groups);

  std::string class_name_;
  int64_t num_experts_, experts_per_token_;
  ExpertPlacement placement_;
  TensorParallelRanksPtr tensor_parallel_;  // each rank has a shard of every expert
  ProcessGroupPtr ranks_;
  std::shared_ptr<Router> router_;
  std::vector<std::shared_ptr<Hooked<Mlp>>> experts_;
  GroupedExperts grouped_experts_;  // of experts_
};

}  // namespace megashard
