#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "models/config/decoder_config.h"
#include "models/config/tensor_parallel_ranks.h"
#include "models/kernels/fused_ops.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Input of a norm: hidden states, possibly sharded by sequence parallelism, or this rank's heads.
enum class NormInput { kHidden, kHeads };

/// RMSNorm or LayerNorm over the last dimension. Zero-centred (Gemma3RMSNorm, Megatron's
/// --apply-layernorm-1p): multiplies by 1 + weight, in fp32 until the result.
struct NormSpec {
  std::string class_name{};  ///< for wrap policies
  int64_t width = 0;
  NormKind kind = NormKind::kRmsNorm;
  double eps = 1e-6;
  bool zero_centered = false;
  bool in_fp32 = false;  ///< multiplies by the weight before it rounds to the input's dtype
  int64_t groups = 1;    ///< norms each of so many equal parts of the channels by itself; RMSNorm only
  bool bias = true;      ///< gives a LayerNorm a bias
  bool weight = true;    ///< false: norms without parameters (RMSNorm)
};

/// A norm and its name among a module's.
struct NamedNorm {
  std::string name;
  NormSpec norm;
};

class Norm : public torch::nn::Module, public SelfInitializing {
 public:
  /// `ranks`: may be null, for one rank.
  explicit Norm(NormSpec spec, TensorParallelRanksPtr ranks = nullptr, NormInput input = NormInput::kHidden);

  at::Tensor forward(const at::Tensor& x);
  /// residual + branch, and forward() of the sum.
  NormedSum forward_sum(const at::Tensor& residual, const at::Tensor& branch);
  /// rotate() of forward(), for heads.
  at::Tensor forward_rotated(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return spec_.class_name; }

  at::Tensor weight;  // [width]; undefined: none
  at::Tensor bias;    // [width]; undefined: none

 private:
  /// The weight, or ones for x.
  at::Tensor factor(const at::Tensor& x) const;
  /// Sums the parameter's gradient over ranks if they have different rows or heads.
  at::Tensor shared(const at::Tensor& parameter) const;

  NormSpec spec_;
  TensorParallelRanksPtr ranks_;
  NormInput input_;
};

/// Registers a norm of hidden states under its name. Null if `norm` is unset.
std::shared_ptr<Hooked<Norm>> register_norm(torch::nn::Module& module, const std::optional<NamedNorm>& norm,
                                            const TensorParallelRanksPtr& ranks);

}  // namespace megashard
