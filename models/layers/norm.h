#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>

#include "models/model_config.h"

namespace megashard {

/// RMSNorm, or LayerNorm with a bias, over the last dimension.
class Norm : public torch::nn::Module {
 public:
  Norm(const DecoderConfig& config, int64_t width);

  at::Tensor forward(const at::Tensor& x);
  std::string class_name() const { return class_name_; }

  at::Tensor weight;  // [width]
  at::Tensor bias;    // [width], LayerNorm only

 private:
  std::string class_name_;
  NormKind kind_;
  double eps_;
};

}  // namespace megashard
