#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "framework/modules/weight_init_mixin.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Computes a linear layer in another way than x W^T + b: in fp8.
class LinearCompute {
 public:
  virtual ~LinearCompute() = default;
  /// x [..., in], weight [out, in], bias [out] or undefined -> [..., out]
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) = 0;
};

/// Adds scale * lora_b(lora_a(dropout(x))) to a linear layer (PEFT's LoraLayer).
struct LowRankAdapter {
  at::Tensor lora_a, lora_b;  ///< parameters lora_A.weight [r, in] and lora_B.weight [out, r]; of experts [E, ...]
  double scale = 0, dropout = 0;
};

/// A module of linear layers that fp8 and LoRA change: a Linear, or the experts of a layer.
class LinearLayers {
 public:
  struct Layer {
    std::string name;               ///< in the module; empty: the module itself
    std::string parameter;          ///< of the module
    at::Tensor weight;              ///< the parameter: [out, in], of experts [E, out, in] or [E, layers, out, in]
    const LowRankAdapter* adapter;  ///< null: none
  };
  virtual ~LinearLayers() = default;
  virtual std::vector<Layer> linear_layers() const = 0;
  /// Replaces x W^T + b in all layers.
  virtual void set_compute(std::shared_ptr<LinearCompute> compute) = 0;
  /// Gives the layers of these names adapters: lora_A initialised as torch's linear layers, lora_B zero.
  virtual void add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) = 0;
};

/// Bound of the uniform initialisation of lora_A: Kaiming's with a = sqrt(5).
double lora_init_bound(int64_t in);

/// y = x W^T + b. Unlike torch::nn::Linear it is created without values, which init_weights() or a checkpoint provides,
/// so that no unused random numbers are drawn.
class Linear : public torch::nn::Module, public SelfInitializing, public LinearLayers {
 public:
  struct Options {
    int64_t in = 0;
    int64_t out = 0;
    bool bias = false;
    double init_scale = 1;  ///< factor of the initialisation's std
  };
  explicit Linear(const Options& options);

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]
  /// forward(swiglu(gate, up)) without saving its input (swiglu_linear) if the layer is plain.
  at::Tensor forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up);

  /// True if it computes x W^T + b alone, so that its product may be fused with others.
  bool is_plain() const { return compute_ == nullptr && lora_a_ == nullptr; }
  std::vector<Layer> linear_layers() const override;
  void set_compute(std::shared_ptr<LinearCompute> compute) override { compute_ = std::move(compute); }
  void add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) override;
  void init_own_weights(const WeightInit& init) override;
  std::string class_name() const { return "Linear"; }

  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out]

 protected:
  at::Tensor product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const;
  double init_scale() const { return init_scale_; }

 private:
  double init_scale_;
  std::shared_ptr<LinearCompute> compute_;
  LowRankAdapter adapter_;
  std::shared_ptr<Hooked<Linear>> lora_a_, lora_b_;  // null: no adapter
};

}  // namespace megashard
