#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "models/layers/linear.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// A linear layer with a low-rank adapter: y + scale * lora_B(lora_A(dropout(x))) (PEFT's LoraLayer).
class LowRankAdapter : public LinearCompute {
 public:
  /// Gives `layer` an adapter: modules lora_A [rank, in], initialised as torch's linear layers, and lora_B [out, rank],
  /// zero. y is what the layer computes so far.
  static void add_to(Linear& layer, int64_t rank, double scale, double dropout);
  /// The layer's adapter; null if it has none.
  static const LowRankAdapter* of(const Linear& layer);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) override;
  double scale() const { return scale_; }
  const at::Tensor& lora_a() const { return lora_a_->weight; }
  const at::Tensor& lora_b() const { return lora_b_->weight; }

 private:
  std::shared_ptr<LinearCompute> base_;  // null: x W^T + b
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;
  double scale_ = 0, dropout_ = 0;
};

/// Bound of the uniform initialisation of lora_A: Kaiming's with a = sqrt(5).
double lora_init_bound(int64_t in);

}  // namespace megashard
