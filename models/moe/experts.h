#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/weights/weight_map.h"
#include "framework/modules/weight_init_mixin.h"
#include "models/config/weight_files.h"
#include "models/kernels/grouped_linear.h"
#include "models/layers/linear.h"
#include "models/layers/mlp.h"
#include "models/layers/part.h"

namespace megashard {

/// Sizes of the experts of a layer.
struct ExpertSizes {
  int64_t experts, hidden, intermediate;
  bool gated = true;
  bool bias = false;
};

/// The forms in which files have the experts of a layer, the published one first: gate_up_proj [E, 2, I, C] (without a
/// gate: up_proj [E, I, C]) and down_proj [E, C, I] of the module `path`, "model.layers.0.mlp.experts." All can be
/// read. Square experts are published packed: transformers transposes a tensor only if its sizes differ from its own.
WeightGroup expert_forms(const std::string& path, const ExpertSizes& sizes, const ExpertFiles& published);

/// The experts of a layer as one module with two parameters, as transformers' Qwen3MoeExperts: gate_up_proj
/// [E, 2, I, C], the gate first (without a gate: up_proj [E, I, C]), and down_proj [E, C, I]. With expert parallelism E
/// are this rank's experts, with tensor parallelism I this rank's channels. Biases are gate_up_proj_bias [E, 2, I] and
/// down_proj_bias [E, C].
class Experts : public torch::nn::Module, public SelfInitializing, public CutOverRanks, public LinearLayers {
 public:
  Experts(const MlpSpec& spec, int64_t num_experts, std::string class_name, const BuildContext& context);

  /// Rows [N, C], sorted by expert -> this rank's partial sums of their results [N, C].
  at::Tensor forward(const at::Tensor& rows, const RowGroupsPtr& groups);

  /// gate_proj, up_proj, down_proj; without a gate, the last two.
  std::vector<Layer> linear_layers() const override;
  bool has_adapters() const override {
    return std::ranges::any_of(adapters_, [](const auto& each) { return each.has_value(); });
  }
  /// fp8 scales are those of one matrix, so `compute` is called for each expert.
  void set_compute(std::shared_ptr<LinearCompute> compute) override { compute_ = std::move(compute); }
  /// Draws the adapters of other ranks' experts, too, so that all begin as on one rank.
  void add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) override;

  void declare_cut(const DeviceMeshPtr& mesh) override;
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return class_name_; }

 private:
  enum Index { kGate, kUp, kDown };
  bool is_plain() const { return compute_ == nullptr && !adapters_[kGate] && !adapters_[kUp] && !adapters_[kDown]; }
  at::Tensor weight_of(Index projection) const;
  at::Tensor project(Index projection, const at::Tensor& rows, const RowGroupsPtr& groups) const;
  /// Adds each expert's bias to its rows.
  at::Tensor with_bias(Index projection, const at::Tensor& results, const RowGroupsPtr& groups) const;

  std::string class_name_;
  MlpSpec spec_;
  int64_t num_experts_;  // of the layer
  ExpertPlacement placement_;
  TensorParallelRanksPtr tensor_parallel_;
  std::shared_ptr<LinearCompute> compute_;
  std::array<std::optional<LowRankAdapter>, 3> adapters_{};  // by Index
  at::Tensor up_, down_;                                     // gate_up_proj or up_proj; down_proj
  at::Tensor up_bias_, down_bias_;                           // undefined: none
};

}  // namespace megashard
