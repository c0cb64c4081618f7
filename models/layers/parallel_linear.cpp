#include "models/layers/parallel_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "models/kernels/fused_ops.h"
#include "models/kernels/linear_products.h"
#include "parallel/fsdp/adjacent_parameters.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

Linear::Options with_outputs_of(Linear::Options options, const TensorParallelRanks& ranks) {
  options.out /= ranks.size();
  return options;
}

Linear::Options with_inputs_of(Linear::Options options, const TensorParallelRanks& ranks) {
  options.in /= ranks.size();
  return options;
}

}  // namespace

void draw_weight(const at::Tensor& weight, at::IntArrayRef whole, int64_t dim, const TensorParallelRanks& ranks,
                 double std, const WeightInit& init) {
  if (weight.defined() && weight.sizes() == whole) {
    weight.normal_(0, std, init.generator);
    return;
  }
  auto options = at::TensorOptions().dtype(at::kFloat);
  if (weight.defined()) options = options.dtype(weight.scalar_type());
  if (weight.defined() && !weight.is_meta()) options = options.device(weight.device());
  const auto drawn = at::empty(whole, options).normal_(0, std, init.generator);
  if (weight.defined()) weight.copy_(drawn.narrow(dim, ranks.rank() * weight.size(dim), weight.size(dim)));
}

ColumnParallelLinear::ColumnParallelLinear(const Options& options, TensorParallelRanksPtr ranks)
    : Linear(with_outputs_of(options, *ranks)), ranks_(std::move(ranks)) {}

void ColumnParallelLinear::declare_cut(const DeviceMeshPtr& mesh) {
  if (ranks_->size() == 1) return;
  set_tensor_parallel(weight, mesh, Placement::shard(0));
  if (bias.defined()) set_tensor_parallel(bias, mesh, Placement::shard(0));
}

void ColumnParallelLinear::init_own_weights(const WeightInit& init) {
  draw_weight(weight, {weight.size(0) * ranks_->size(), weight.size(1)}, 0, *ranks_, init.std * init_scale(), init);
  if (bias.defined()) bias.zero_();
}

RowParallelLinear::RowParallelLinear(const Options& options, TensorParallelRanksPtr ranks)
    : Linear(with_inputs_of(options, *ranks)), ranks_(std::move(ranks)) {}

at::Tensor RowParallelLinear::forward(const at::Tensor& x) {
  return ranks_->size() == 1 ? Linear::forward(x) : sum_over_ranks(product(x, weight, at::Tensor()));
}

at::Tensor RowParallelLinear::forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  if (!is_plain()) return forward(swiglu(gate, up));
  if (ranks_->size() == 1) return Linear::forward_of_swiglu(gate, up);
  return sum_over_ranks(swiglu_linear(gate, up, weight, at::Tensor()));
}

at::Tensor RowParallelLinear::sum_over_ranks(const at::Tensor& partial) const {
  const auto y = ranks_->leave(partial);
  return bias.defined() ? y + ranks_->for_own_rows(bias) : y;
}

void RowParallelLinear::declare_cut(const DeviceMeshPtr& mesh) {
  if (ranks_->size() > 1) set_tensor_parallel(weight, mesh, Placement::shard(1));
}

void RowParallelLinear::init_own_weights(const WeightInit& init) {
  draw_weight(weight, {weight.size(0), weight.size(1) * ranks_->size()}, 1, *ranks_, init.std * init_scale(), init);
  if (bias.defined()) bias.zero_();
}

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
