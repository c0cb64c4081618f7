#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "models/layers/norm.h"
#include "models/layers/part.h"
#include "models/network/network.h"

namespace megashard {

/// The residual branches of a LayerSpec.
class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const LayerSpec& spec, const BuildContext& context);

  LayerOutput forward(const at::Tensor& hidden, const Pass& pass);  // [B, T, C]
  std::string class_name() const { return class_name_; }

 private:
  struct BuiltBranch {
    std::shared_ptr<Part> part;
    std::shared_ptr<Hooked<Norm>> before, after;  // null: none
    bool parallel;
  };

  /// A branch's output as it is added: with dropout and scale.
  at::Tensor as_added(at::Tensor branch) const;

  std::string class_name_;
  double dropout_, scale_;
  std::vector<BuiltBranch> branches_;
  at::Tensor scalar_;  // [1]; undefined: none
};

}  // namespace megashard
