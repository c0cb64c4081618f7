#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "models/kernels/float8_linear.h"
#include "models/kernels/row_groups.h"
#include "models/layers/mlp.h"
#include "models/layers/parallel_linear.h"
#include "models/layers/part.h"

namespace megashard {

/// The experts of a layer as one module with two parameters, as transformers' Qwen3MoeExperts: gate_up_proj
/// [E, 2, I, C], the gate first (without a gate: up_proj [E, I, C]), and down_proj [E, C, I]. With expert parallelism E
/// are this rank's experts, with tensor parallelism I this rank's channels. Without biases.
class Experts : public torch::nn::Module, public SelfInitializing, public CutOverRanks {
 public:
  /// y + scale * lora_b(lora_a(dropout(x))) of each expert (PEFT's LoraLayer).
  struct Adapter {
    at::Tensor lora_a, lora_b;  ///< parameters NAME.lora_A.weight [E, r, in] and NAME.lora_B.weight [E, out, r]
    double scale = 0, dropout = 0;
  };
  /// A linear layer of all experts.
  struct Projection {
    const char* name;        ///< gate_proj, up_proj, down_proj
    at::Tensor weight;       ///< [E, out, in], a view of a parameter
    const Adapter* adapter;  ///< null: none
  };

  Experts(const MlpSpec& spec, int64_t num_experts, std::string class_name, const BuildContext& context);

  /// Rows [N, C], sorted by expert -> this rank's partial sums of their results [N, C].
  at::Tensor forward(const at::Tensor& rows, const RowGroupsPtr& groups);

  /// Adds adapters to these projections, as LowRankAdapter. Draws those of other ranks' experts, too, so that all
  /// begin as on one rank.
  void add_adapters(const std::vector<std::string>& projections, int64_t rank, double scale, double dropout);
  void compute_in_float8(const Float8Options& options) { float8_ = options; }
  /// gate_proj, up_proj, down_proj; without a gate, the last two.
  std::vector<Projection> projections() const;
  /// Those of a parameter: of gate_up_proj two, else one.
  std::vector<Projection> projections_of(const at::Tensor& parameter) const;

  void declare_cut(const DeviceMeshPtr& mesh) override;
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return class_name_; }

 private:
  enum Index { kGate, kUp, kDown };
  bool is_plain() const { return !float8_ && !adapters_[kGate] && !adapters_[kUp] && !adapters_[kDown]; }
  at::Tensor weight_of(Index projection) const;
  at::Tensor project(Index projection, const at::Tensor& rows, const RowGroupsPtr& groups) const;

  std::string class_name_;
  MlpSpec spec_;
  int64_t num_experts_;  // of the layer
  ExpertPlacement placement_;
  TensorParallelRanksPtr tensor_parallel_;
  std::optional<Float8Options> float8_{};
  std::array<std::optional<Adapter>, 3> adapters_{};  // by Index
  at::Tensor up_, down_;                              // gate_up_proj or up_proj; down_proj
};

}  // namespace megashard
