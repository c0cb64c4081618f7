#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/decoder_config.h"
#include "models/layers/mlp.h"
#include "models/moe/expert_exchange.h"
#include "models/moe/grouped_experts.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Hidden states, and what the routers on their way did.
struct RoutedStates {
  at::Tensor hidden;
  /// Of a layer [2, B, experts] fp32: how many tokens of each sequence each expert was given, and the
  /// sum over the tokens of its probability, which has a gradient; tokens that a mask leaves out count
  /// for neither. Undefined where no loss of routers is asked for. Of several layers [layers, 2, B, experts].
  at::Tensor balance;
  /// Of a layer a scalar, of several [layers] fp32: the squared logsumexp of a token's logits, summed
  /// over these tokens. Undefined without a z-loss.
  at::Tensor z;

  template <class F>
  void visit_tensors(F&& f) {
    f(hidden);
    f(balance);
    f(z);
  }
};

/// The experts of each token and their weights.
struct Routing {
  at::Tensor weights;     // [N, K], of the hidden states' dtype
  at::Tensor experts;     // [N, K] int64
  at::Tensor balance, z;  // as in RoutedStates, of this layer

  template <class F>
  void visit_tensors(F&& f) {
    f(weights);
    f(experts);
    f(balance);
    f(z);
  }
};

/// Softmax in fp32 over the experts' logits, then the K largest (transformers' Qwen3MoeTopKRouter).
class TopKRouter : public torch::nn::Module, public SelfInitializing {
 public:
  explicit TopKRouter(const DecoderConfig& config);

  /// [N, C] of so many sequences; `mask` [N] bool: the tokens that count for the losses; undefined: all.
  Routing forward(const at::Tensor& tokens, const at::Tensor& mask, int64_t sequences);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return class_name_; }

  at::Tensor weight;  // [experts, C]

 private:
  std::string class_name_;
  MoeConfig config_;
};

/// Stands in the list of experts for one that another rank has. It draws the numbers that the
/// expert would start with, so that all experts start as on one rank.
class RemoteExpert : public torch::nn::Module, public SelfInitializing {
 public:
  explicit RemoteExpert(const DecoderConfig& config) : config_(config) {}
  /// A new expert without values, for what is drawn for it.
  std::shared_ptr<Hooked<Mlp>> expert() const;
  void init_own_weights(const WeightInit& init) override;

 private:
  DecoderConfig config_;
};

/// Router `gate` and the list `experts`. Rows are sorted by expert once; each expert has those that are
/// its own, in one product for all or one after the other (GroupedExperts), and the weighted sum of a
/// token's results takes its place. Every expert runs, also on no rows: its gradients are zeros then,
/// and as a unit of fully_shard it joins the collectives of the ranks that have rows for it. With
/// experts on several ranks, rows go to those that have theirs, and results come back; on a GPU the
/// host waits for their numbers then, once a forward.
class SparseMoeBlock : public torch::nn::Module {
 public:
  explicit SparseMoeBlock(const DecoderConfig& config);

  /// [B, T, C]; `token_mask` as Batch's.
  RoutedStates forward(const at::Tensor& hidden, const at::Tensor& token_mask);
  std::string class_name() const { return class_name_; }

  /// The ranks that share the experts, in the order of their experts; before the first forward.
  void set_ranks(ProcessGroupPtr ranks) { ranks_ = std::move(ranks); }
  const std::vector<std::shared_ptr<Hooked<Mlp>>>& experts() const { return experts_; }

 private:
  /// Rows sorted by expert -> their results.
  at::Tensor run_experts(const at::Tensor& rows, const RowGroupsPtr& groups);

  std::string class_name_;
  MoeConfig config_;
  TensorParallelRanksPtr tensor_parallel_;  // each has a piece of every expert
  ProcessGroupPtr ranks_;
  std::shared_ptr<Hooked<TopKRouter>> gate_;
  std::vector<std::shared_ptr<Hooked<Mlp>>> experts_;  // this rank's
  GroupedExperts grouped_experts_;                     // the same
};

}  // namespace megashard
