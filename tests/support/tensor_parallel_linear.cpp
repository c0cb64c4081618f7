#include "tests/support/tensor_parallel_linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>
#include <torch/nn/init.h>

#include <cmath>

#include "parallel/fsdp/fully_shard.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {
namespace {

int64_t share_of(int64_t features, const char* which, const char* layer, const DeviceMeshPtr& mesh) {
  TORCH_CHECK(mesh != nullptr && mesh->ndim() == 1, layer, " needs options.mesh, a 1-D mesh (mesh->submesh({\"tp\"}))");
  TORCH_CHECK(features > 0 && features % mesh->size(0) == 0, layer, ": ", features, " ", which,
              " features cannot be cut evenly over the ", mesh->size(0), " ranks of mesh ", mesh->describe(),
              ": pad them to a multiple of ", mesh->size(0));
  return features / mesh->size(0);
}

/// Draws torch::nn::Linear's initial values of the whole layer; each parameter takes its piece.
void draw_linear(const at::Tensor& weight, const at::Tensor& bias, int64_t out, int64_t in) {
  const at::NoGradGuard no_grad;
  auto options = at::TensorOptions().dtype(weight.scalar_type());
  if (!weight.is_meta()) options = options.device(weight.device());
  const at::Tensor whole = at::empty({out, in}, options);
  torch::nn::init::kaiming_uniform_(whole, std::sqrt(5.0));
  assign_full_parameter(weight, whole);
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  const at::Tensor whole_bias = at::empty({out}, options);
  torch::nn::init::uniform_(whole_bias, -bound, bound);
  assign_full_parameter(bias, whole_bias);
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(ColumnParallelLinearOptions given) : options(std::move(given)) {
  reset();
}

void ColumnParallelLinearImpl::reset() {
  const int64_t out = share_of(options.out_features, "output", "ColumnParallelLinear", options.mesh);
  weight = register_parameter("weight", at::empty({out, options.in_features}));
  set_tensor_parallel(weight, options.mesh, Placement::shard(0));
  bias = register_parameter("bias", options.bias ? at::empty({out}) : at::Tensor(), options.bias);
  if (bias.defined()) set_tensor_parallel(bias, options.mesh, Placement::shard(0));
  reset_parameters();
}

void ColumnParallelLinearImpl::reset_parameters() {
  draw_linear(weight, bias, options.out_features, options.in_features);
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  const auto& group = options.mesh->group(0);
  const at::Tensor output = at::linear(copy_to_tensor_parallel_region(input, group), weight, bias);
  return options.gather_output ? gather_from_tensor_parallel_region(output, group) : output;
}

RowParallelLinearImpl::RowParallelLinearImpl(RowParallelLinearOptions given) : options(std::move(given)) { reset(); }

void RowParallelLinearImpl::reset() {
  const int64_t in = share_of(options.in_features, "input", "RowParallelLinear", options.mesh);
  weight = register_parameter("weight", at::empty({options.out_features, in}));
  set_tensor_parallel(weight, options.mesh, Placement::shard(1));
  bias = register_parameter("bias", options.bias ? at::empty({options.out_features}) : at::Tensor(), options.bias);
  if (bias.defined()) set_tensor_parallel(bias, options.mesh, Placement::replicate());
  reset_parameters();
}

void RowParallelLinearImpl::reset_parameters() { draw_linear(weight, bias, options.out_features, options.in_features); }

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const auto& group = options.mesh->group(0);
  if (group->size() == 1) return at::linear(input, weight, bias);
  const at::Tensor piece = options.input_is_parallel ? input : scatter_to_tensor_parallel_region(input, group);
  TORCH_CHECK(piece.dim() > 0 && piece.size(-1) == options.in_features / group->size(), "RowParallelLinear of ",
              options.in_features, " input features over ", group->size(), " ranks was given a tensor of sizes ",
              input.sizes(),
              ": with input_is_parallel the last dimension is this rank's piece, without it all features");
  const at::Tensor sum = reduce_from_tensor_parallel_region(at::linear(piece, weight), group);
  return bias.defined() ? sum + bias : sum;
}

}  // namespace megashard
