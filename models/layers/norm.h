#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/decoder_config.h"
#include "models/kernels/fused_ops.h"

namespace megashard {

/// What a norm is given: hidden states, of which a rank may have its rows, or its own heads.
enum class NormInput { kHidden, kHeads };

/// RMSNorm, or LayerNorm with a bias, over the last dimension. Zero-centred (Gemma3RMSNorm, Megatron's
/// --apply-layernorm-1p): factors are 1 + weight, in fp32 up to the result.
class Norm : public torch::nn::Module, public SelfInitializing {
 public:
  Norm(const DecoderConfig& config, int64_t width, NormInput input = NormInput::kHidden);

  at::Tensor forward(const at::Tensor& x);
  /// residual + branch, and forward() of it.
  NormedSum forward_sum(const at::Tensor& residual, const at::Tensor& branch);
  /// rotate() of forward(), for heads.
  at::Tensor forward_rotated(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return class_name_; }

  at::Tensor weight;  // [width]
  at::Tensor bias;    // [width], LayerNorm only

 private:
  /// What backward gives it is the sum over the ranks, where they see different rows or heads.
  at::Tensor shared(const at::Tensor& parameter) const;

  std::string class_name_;
  NormInput input_;
  TensorParallelRanksPtr ranks_;
  NormKind kind_;
  bool zero_centered_;
  double eps_;
};

}  // namespace megashard
