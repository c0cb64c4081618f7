#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/kernels/grouped_linear.h"
#include "models/layers/part.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

class SparseMoeBlock;

/// Dispatch of expert parallelism: sends the rows of one forward to the ranks that have their experts, and the results
/// back. Each rank of `ranks` has the same number of experts, in order. All ranks construct one and call its functions
/// together, in forward and in backward.
class ExpertExchange : public torch::CustomClassHolder {
 public:
  /// `counts` [experts] int64: how many of this rank's `rows` go to each expert. Collective. Blocks the host.
  ExpertExchange(ProcessGroupPtr ranks, const at::Tensor& counts, int64_t rows);

  /// The rows from all ranks for each of this rank's experts.
  const RowGroupsPtr& own_rows() const { return own_rows_; }

  /// Rows sorted by expert [n, C] -> the rows for this rank's experts [m, C], sorted by expert. Differentiable, like
  /// send_back.
  static at::Tensor send(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& rows);
  /// Results in the order of send's result -> the results of this rank's rows, in the order of send's argument. An
  /// expert gets gradients from all of `ranks`, each of a loss that is averaged over all ranks: between send and
  /// send_back they are divided by the number of ranks.
  static at::Tensor send_back(const c10::intrusive_ptr<ExpertExchange>& exchange, const at::Tensor& results);

  int ranks() const { return ranks_->size(); }
  at::Tensor there(const at::Tensor& rows) const;
  at::Tensor back(const at::Tensor& results) const;

 private:
  /// Rows sorted by destination rank -> rows that arrive, sorted by source rank.
  at::Tensor swap(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received) const;

  ProcessGroupPtr ranks_;
  RowGroupsPtr own_rows_;
  std::vector<int64_t> sent_, received_;  // rows to and from each rank
  at::Tensor by_expert_, by_rank_;        // orders of the rows that arrive; undefined: this rank has one expert
};

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
