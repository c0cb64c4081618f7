#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "models/config/decoder_config.h"
#include "models/layers/joint_linears.h"
#include "models/layers/linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

at::Tensor activate(const at::Tensor& x, Activation activation);

/// down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate. Projections gate_proj, up_proj, down_proj, sharded
/// over tensor parallel ranks.
class Mlp : public torch::nn::Module {
 public:
  /// An MLP from hidden states to hidden states.
  explicit Mlp(const DecoderConfig& config) : Mlp(config, config.intermediate_size, Linear::Cut::kInputs) {}
  /// An expert: rows [N, C] -> this rank's partial sum.
  static std::shared_ptr<Hooked<Mlp>> expert(const DecoderConfig& config);
  Mlp(const DecoderConfig& config, int64_t intermediate_size, Linear::Cut cut_of_down);

  at::Tensor forward(const at::Tensor& hidden);  // [..., C] -> [..., C]
  /// Parts for experts that share their products: gate_proj and up_proj, or up_proj.
  const std::vector<std::shared_ptr<Hooked<Linear>>>& widening() const { return widening_.layers(); }
  /// Activation of their outputs [..., I].
  at::Tensor activated(const std::vector<at::Tensor>& wide) const;
  /// down_proj.
  const std::shared_ptr<Hooked<Linear>>& narrowing() const { return down_proj_; }
  /// True if activated() is swiglu of two outputs.
  bool is_swiglu() const { return widening().size() == 2 && activation_ == Activation::kSilu; }
  std::string class_name() const { return class_name_; }

 private:
  at::Tensor of_rows(const at::Tensor& hidden);

  std::string class_name_;
  Activation activation_;
  int64_t tiles_;
  TensorParallelRanksPtr ranks_;  // null for an expert, which does not communicate itself
  JointLinears widening_;
  std::shared_ptr<Hooked<Linear>> down_proj_;
};

}  // namespace megashard
