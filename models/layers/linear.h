#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>

#include "framework/modules/weight_init_mixin.h"
#include "parallel/fsdp/hooked_module.h"

namespace megashard {

/// Computes a linear layer in another way than x W^T + b: in fp8, or with an adapter beside it.
class LinearCompute {
 public:
  virtual ~LinearCompute() = default;
  /// x [..., in], weight [out, in], bias [out] or undefined -> [..., out]
  virtual at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) = 0;
};

/// y = x W^T + b. Unlike torch::nn::Linear it is created without values, which init_weights() or a checkpoint provides,
/// so that no unused random numbers are drawn.
class Linear : public torch::nn::Module, public SelfInitializing {
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

  /// True if there is no other way of computing it, so that its product may be fused with others.
  bool is_plain() const { return compute_ == nullptr; }
  const std::shared_ptr<LinearCompute>& compute() const { return compute_; }  ///< null: x W^T + b
  void set_compute(std::shared_ptr<LinearCompute> compute) { compute_ = std::move(compute); }
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
};

}  // namespace megashard
