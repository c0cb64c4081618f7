#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "framework/modules/weight_init_mixin.h"

namespace megashard {

/// Parameters of a convolution of each channel (kernels/causal_conv.h), with the names and sizes of a torch Conv1d.
class ChannelConv : public torch::nn::Module, public SelfInitializing {
 public:
  ChannelConv(int64_t channels, int64_t width, bool has_bias = false) {
    weight = register_parameter("weight", at::empty({channels, 1, width}));
    if (has_bias) bias = register_parameter("bias", at::empty({channels}));
  }
  void init_own_weights(const WeightInit& init) override {
    weight.normal_(0, init.std, init.generator);
    if (bias.defined()) bias.zero_();
  }
  std::string class_name() const { return "Conv1d"; }

  at::Tensor weight;  // [channels, 1, width]
  at::Tensor bias;    // [channels]; undefined: none
};

}  // namespace megashard
