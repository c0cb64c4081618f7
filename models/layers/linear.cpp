#include "models/layers/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "models/kernels/fused_ops.h"
#include "models/kernels/linear_products.h"
#include "models/kernels/once_differentiable.h"
#include "models/kernels/row_layout.h"
#include "parallel/fsdp/adjacent_parameters.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

Linear::Linear(const Options& options) : init_scale_(options.init_scale) {
  weight = register_parameter("weight", at::empty({options.out, options.in}));
  if (options.bias) bias = register_parameter("bias", at::empty({options.out}));
}

at::Tensor Linear::forward(const at::Tensor& x) { return product(x, weight, bias); }

at::Tensor Linear::forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return is_plain() ? swiglu_linear(gate, up, weight, bias) : forward(swiglu(gate, up));
}

at::Tensor Linear::product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const {
  const auto y = compute_ == nullptr ? linear(x, w, b) : compute_->forward(x, w, b);
  if (lora_a_ == nullptr || !uses_adapters()) return y;
  const bool drops = lora_a_->is_training() && adapter_.dropout > 0;
  const auto narrow = lora_a_->forward(drops ? at::dropout(x, adapter_.dropout, /*train=*/true) : x);
  return at::add(y, lora_b_->forward(narrow), adapter_.scale);
}

std::vector<LinearLayers::Layer> Linear::linear_layers() const {
  return {{"", "weight", weight, lora_a_ == nullptr ? nullptr : &adapter_}};
}

void Linear::add_adapters(const std::vector<std::string>& names, int64_t rank, double scale, double dropout) {
  if (names.empty()) return;
  const int64_t out = weight.size(0), in = weight.size(1);
  const auto part = [this](const char* name, int64_t from, int64_t to) {
    return register_module(name, std::make_shared<Hooked<Linear>>(Options{.in = from, .out = to}));
  };
  lora_a_ = part("lora_A", in, rank);
  lora_b_ = part("lora_B", rank, out);
  adapter_ = {lora_a_->weight, lora_b_->weight, scale, dropout};
  const at::NoGradGuard no_grad;
  adapter_.lora_a.uniform_(-lora_init_bound(in), lora_init_bound(in));
  adapter_.lora_b.zero_();
}

void Linear::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std * init_scale_, init.generator);
  if (bias.defined()) bias.zero_();
}

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

at::Tensor ReplicatedLinear::forward(const at::Tensor& x) {
  return product(x, ranks_->for_own_rows(weight), bias.defined() ? ranks_->for_own_rows(bias) : bias);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::vector<int64_t> widths_of(at::TensorList weights) {
  std::vector<int64_t> widths;
  for (const auto& weight : weights) widths.push_back(weight.size(0));
  return widths;
}

/// One product of x [..., in] for weights [out_i, in], biases none or one each, also in backward: the weights'
/// gradients are rows of one tensor.
struct JointLinear : torch::autograd::Function<JointLinear> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                               at::TensorList biases) {
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["biases"] = !biases.empty();
    const auto bias = biases.empty() ? at::Tensor() : at::cat(biases);
    return parts_of(linear_product(x, adjacent_matrix(weights), bias), -1, widths_of(weights));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("joint_linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto weights = at::TensorList(saved).slice(1);
    const bool has_biases = context->saved_data["biases"].toBool();
    const auto joined = joined_columns(grads);
    const auto grad = widened_for_products(joined);
    const auto needs = [&](size_t first) {
      bool any = false;
      for (size_t i = 0; i < weights.size(); ++i) any |= context->needs_input_grad(first + i);
      return any;
    };
    variable_list results(1 + weights.size() * (has_biases ? 2 : 1));
    if (context->needs_input_grad(0)) {
      const auto whole = adjacent_matrix(weights);
      results[0] = gradient_of_linear_input(grad, whole.defined() ? whole : at::cat(weights)).view(x.sizes());
    }
    const auto give = [&](size_t first, const at::Tensor& whole) {
      const auto parts = parts_of(whole, 0, widths_of(weights));
      for (size_t i = 0; i < parts.size(); ++i) {
        if (context->needs_input_grad(first + i)) results[first + i] = parts[i];
      }
    };
    if (needs(1)) give(1, gradient_of_linear_weight(grad, x));
    if (has_biases && needs(1 + weights.size())) give(1 + weights.size(), joined.sum(0));
    return results;
  }
};

}  // namespace

bool can_join(const at::Tensor& x, at::TensorList weights) {
  return x.scalar_type() == weights[0].scalar_type() && x.device() == weights[0].device() &&
         adjacent_matrix(weights).defined();
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
      return JointLinear::apply(x, at::TensorList(weights), at::TensorList(biases));
    }
  }
  std::vector<at::Tensor> results;
  for (const auto& layer : layers_) results.push_back(layer->forward(x));
  return results;
}

double rounded(double value, at::ScalarType dtype) {
  const auto single = static_cast<float>(value);
  if (dtype == at::kBFloat16) return static_cast<float>(c10::BFloat16(single));
  return dtype == at::kHalf ? static_cast<float>(c10::Half(single)) : single;
}

Embedding::Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index, TensorParallelRanksPtr ranks)
    : rows_(rows), padding_index_(padding_index), ranks_(std::move(ranks)) {
  if (ranks_ != nullptr && ranks_->size() == 1) ranks_ = nullptr;
  const int64_t own = ranks_ == nullptr ? rows : rows / ranks_->size();
  if (ranks_ != nullptr) first_row_ = own * ranks_->rank();
  if (padding_index_) *padding_index_ -= first_row_;
  if (padding_index_ && (*padding_index_ < 0 || *padding_index_ >= own)) padding_index_.reset();
  weight = register_parameter("weight", at::empty({own, width}));
}

void Embedding::declare_cut(const DeviceMeshPtr& mesh) {
  if (ranks_ != nullptr) set_tensor_parallel(weight, mesh, Placement::shard(0));
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  TORCH_CHECK(indices.scalar_type() == at::kLong, "embedding indices must be int64, got ", indices.scalar_type());
  if (indices.device().is_cpu()) {  // a check would block the host on a GPU; the kernel asserts instead
    const auto flat = indices.contiguous();
    const auto* index = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(index[i] >= 0 && index[i] < rows_, "token or position ", index[i], " lies outside an embedding of ",
                  rows_,
                  " rows: the data were tokenised with another tokenizer than the model's, or are too long for it");
    }
  }
  if (ranks_ == nullptr) return at::embedding(weight, indices, padding_index_.value_or(-1));
  const auto own = indices - first_row_;
  const auto others = own.lt(0).logical_or(own.ge(weight.size(0)));
  const auto rows = at::embedding(weight, own.masked_fill(others, 0), padding_index_.value_or(-1));
  return ranks_->leave(rows.masked_fill(others.unsqueeze(-1), 0));
}

void Embedding::init_own_weights(const WeightInit& init) {
  if (ranks_ == nullptr) {
    weight.normal_(0, init.std, init.generator);
  } else {
    draw_weight(weight, {weight.size(0) * ranks_->size(), weight.size(1)}, 0, *ranks_, init.std, init);
  }
  if (padding_index_) weight.select(0, *padding_index_).zero_();
}

at::Tensor Head::own_weight() const { return tied_ ? with_own_gradient(weight) : weight; }

at::Tensor Head::forward(const at::Tensor& x) { return soft_capped(product(x, own_weight(), bias), softcap_); }

TokenLosses Head::token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                               std::optional<int64_t> at_once) {
  const auto group = ranks()->size() == 1 ? nullptr : ranks()->group();
  if (!is_plain() || bias.defined()) return {vocab_parallel_cross_entropy(forward(x), labels, group), {}};
  return linear_cross_entropy(x, own_weight(), labels, group, loss_weights, at_once, softcap_);
}

HeadOutputs Head::outputs(const at::Tensor& x, const HeadQuestion& question, std::optional<int64_t> at_once) {
  TORCH_CHECK(is_plain() && !bias.defined(),
              "the objective needs the entropies or a teacher's tokens of lm_head, which must be a plain product then: "
              "leave out adapters and fp8 of lm_head");
  const auto group = ranks()->size() == 1 ? nullptr : ranks()->group();
  return linear_head_outputs(x, own_weight(), question, group, at_once, softcap_);
}

ScoreHead::ScoreHead(int64_t in) { weight = register_parameter("weight", at::empty({1, in})); }

at::Tensor ScoreHead::forward(const at::Tensor& x) {
  return linear(x, weight, at::Tensor()).squeeze(-1).to(at::kFloat);
}

void ScoreHead::init_own_weights(const WeightInit& init) { weight.normal_(0, init.std, init.generator); }

}  // namespace megashard
