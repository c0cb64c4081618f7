#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "framework/modules/weight_init_mixin.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// y = x W^T + b. Unlike torch::nn::Linear it starts without values: init_weights() or a checkpoint
/// gives them, and a start does not pay for random numbers that nobody reads.
class Linear : public torch::nn::Module, public SelfInitializing {
 public:
  struct Options {
    int64_t in = 0;
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< on the std of the initialisation
    bool tied = false;      ///< the weight is another module's, too
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]

  /// Low-rank adapters: y + scale * lora_B(lora_A(dropout(x))), with lora_A [rank, in] as torch
  /// starts a linear layer and lora_B [out, rank] zero (PEFT's LoraLayer).
  void add_adapter(int64_t rank, double scale, double dropout);
  bool has_adapter() const { return lora_a_ != nullptr; }
  double adapter_scale() const { return adapter_scale_; }
  const at::Tensor& lora_a() const { return lora_a_->weight; }
  const at::Tensor& lora_b() const { return lora_b_->weight; }
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 private:
  double init_scale_;
  bool tied_;
  double adapter_scale_ = 0, adapter_dropout_ = 0;
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;
};

/// Rows of a table; starts without values, as Linear. A padding row gets no gradient and starts at
/// zero.
class Embedding : public torch::nn::Module, public SelfInitializing {
 public:
  Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index = std::nullopt);

  /// indices [...] int64 -> [..., width]. On a CPU, an index outside the table is an error that
  /// names it.
  at::Tensor forward(const at::Tensor& indices);
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Embedding"; }

  at::Tensor weight;  // [rows, width]

 private:
  int64_t rows_;
  std::optional<int64_t> padding_index_;
};

}  // namespace megashard
