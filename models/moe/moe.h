#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/norm.h"
#include "models/layers/part.h"
#include "models/moe/experts.h"
#include "models/moe/router.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// An MLP beside the experts, for all tokens.
struct SharedExpertSpec {
  std::string name{};  ///< of its module
  MlpSpec mlp{};
  bool gated = false;                          ///< multiplies its output by sigmoid(shared_expert_gate(x))
  std::optional<NamedNorm> before{}, after{};  ///< norm its input and output
};

/// A mixture of experts as a part of a layer.
struct MoeSpec {
  std::string class_name{}, experts_class{};  ///< of the block and of its experts, for wrap policies
  int64_t hidden_size = 0;
  MoeConfig moe{};
  MlpSpec expert{};  ///< of the hidden states, or of a latent if its hidden_size is another
  bool latent_bias = false;
  RouterSpecPtr router{};
  std::optional<SharedExpertSpec> shared{};
  std::optional<NamedNorm> before{}, after{};  ///< norm the experts' input, not the router's, and their sum
};

PartSpecPtr experts_part(MoeSpec spec);

/// The router, `experts`, the shared expert if there is one, and fc1_latent_proj and fc2_latent_proj to the experts'
/// latent and back if they have one. Rows are sorted by expert once; the weighted sum of
/// a token's results takes its place. With expert parallelism rows travel to the ranks of their experts, and results
/// come back; on a GPU this blocks the host once per forward.
class SparseMoeBlock : public torch::nn::Module {
 public:
  SparseMoeBlock(const MoeSpec& spec, const BuildContext& context);

  LayerOutput forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C]
  std::string class_name() const { return class_name_; }

  /// Sets the ranks that share the experts, in the order of their experts. Call it before the first forward.
  void set_ranks(ProcessGroupPtr ranks) { ranks_ = std::move(ranks); }
  Experts& experts() const { return *experts_; }  ///< this rank's

 private:
  /// x [B, T, C], this rank's rows -> the shared expert's output.
  at::Tensor run_shared(const at::Tensor& own_states);
  /// Rows sorted by expert -> their results.
  at::Tensor run_experts(const at::Tensor& rows, const RowGroupsPtr& groups);

  std::string class_name_;
  int64_t num_experts_;
  bool weighs_inputs_;
  ExpertPlacement placement_;
  TensorParallelRanksPtr tensor_parallel_;  // each rank has a shard of every expert
  ProcessGroupPtr ranks_;
  std::shared_ptr<Router> router_;
  std::shared_ptr<Hooked<Experts>> experts_;
  std::shared_ptr<Hooked<Linear>> to_latent_, from_latent_;                      // null: experts of the hidden states
  std::shared_ptr<Hooked<Mlp>> shared_;                                          // null: none
  std::shared_ptr<Hooked<ReplicatedLinear>> shared_gate_;                        // null: none
  std::shared_ptr<Hooked<Norm>> before_, after_, before_shared_, after_shared_;  // null: none
};

}  // namespace megashard
