#include "models/layers/joint_linears.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "models/kernels/joint_linear.h"
#include "parallel/fsdp/adjacent_parameters.h"

namespace megashard {
namespace {

using Weights = c10::SmallVector<at::Tensor, 4>;

Weights weights_of(const JointLinears::Layers& layers) {
  Weights weights;
  for (const auto& layer : layers) weights.push_back(layer->weight);
  return weights;
}

}  // namespace

JointLinears::JointLinears(Layers layers) : layers_(std::move(layers)) { keep_adjacent(weights_of(layers_)); }

std::vector<at::Tensor> JointLinears::forward(const at::Tensor& x) const {
  const auto is_plain = [](const auto& layer) { return layer->is_transparent() && layer->is_plain(); };
  if (std::all_of(layers_.begin(), layers_.end(), is_plain)) {
    const auto weights = weights_of(layers_);
    if (can_join(x, weights)) {
      Weights biases;
      if (layers_[0]->bias.defined()) {
        for (const auto& layer : layers_) biases.push_back(layer->bias);
      }
      return joint_linear(x, weights, biases);
    }
  }
  std::vector<at::Tensor> results;
  for (const auto& layer : layers_) results.push_back(layer->forward(x));
  return results;
}

}  // namespace megashard
