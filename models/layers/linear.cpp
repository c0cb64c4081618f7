#include "models/layers/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "models/kernels/cross_entropy.h"
#include "models/kernels/fused_ops.h"
#include "models/kernels/swiglu_linear.h"
#include "parallel/tensor_parallel_layout.h"

namespace megashard {

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

Linear::Linear(const Options& options)
    : init_scale_(options.init_scale),
      tied_(options.tied),
      cut_(options.ranks == nullptr || options.ranks->size() == 1 ? Cut::kNone : options.cut),
      ranks_(options.ranks) {
  const int64_t out = cut_ == Cut::kOutputs ? options.out / ranks_->size() : options.out;
  const int64_t in = cuts_inputs() ? options.in / ranks_->size() : options.in;
  weight = register_parameter("weight", at::empty({out, in}));
  if (options.bias) bias = register_parameter("bias", at::empty({out}));
}

void Linear::declare_cut(const DeviceMeshPtr& mesh) {
  if (cut_ == Cut::kNone) return;
  set_tensor_parallel(weight, mesh, Placement::shard(cuts_inputs() ? 1 : 0));
  if (bias.defined() && !cuts_inputs()) set_tensor_parallel(bias, mesh, Placement::shard(0));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  if (cuts_inputs()) return sum_over_ranks(product(x, weight, at::Tensor()));
  auto y = product(x, tied_ ? with_own_gradient(weight) : weight, bias);
  if (!has_adapter()) return y;
  const bool drops = is_training() && adapter_dropout_ > 0;
  const auto narrow = lora_a_->forward(drops ? at::dropout(x, adapter_dropout_, true) : x);
  return at::add(y, lora_b_->forward(narrow), adapter_scale_);
}

at::Tensor Linear::forward_of_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  if (has_adapter() || float8_) return forward(swiglu(gate, up));
  if (cuts_inputs()) return sum_over_ranks(swiglu_linear(gate, up, weight, at::Tensor()));
  return swiglu_linear(gate, up, weight, bias);
}

at::Tensor Linear::sum_over_ranks(const at::Tensor& partial) const {
  const auto y = ranks_->leave(partial);
  return bias.defined() ? y + ranks_->for_own_rows(bias) : y;
}

TokenLosses Linear::token_losses(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& loss_weights,
                                 std::optional<int64_t> at_once) {
  TORCH_INTERNAL_ASSERT(!cuts_inputs());
  const auto group = cut_ == Cut::kNone ? nullptr : ranks_->group();
  if (has_adapter() || float8_ || bias.defined()) return {vocab_parallel_cross_entropy(forward(x), labels, group), {}};
  return linear_cross_entropy(x, tied_ ? with_own_gradient(weight) : weight, labels, group, loss_weights, at_once);
}

at::Tensor Linear::product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const {
  return float8_ ? float8_linear(x, w, b, *float8_) : linear(x, w, b);
}

void Linear::add_adapter(int64_t rank, double scale, double dropout) {
  const int64_t in = weight.size(1);
  adapter_scale_ = scale;
  adapter_dropout_ = dropout;
  lora_a_ = register_module("lora_A", std::make_shared<Hooked<Linear>>(Options{.in = in, .out = rank}));
  lora_b_ = register_module("lora_B", std::make_shared<Hooked<Linear>>(Options{.in = rank, .out = weight.size(0)}));
  const at::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(in));  // Kaiming's bound with a = sqrt(5)
  lora_a_->weight.uniform_(-bound, bound);
  lora_b_->weight.zero_();
}

void Linear::init_own_weights(const WeightInit& init) {
  const double std = init.std * init_scale_;
  if (cut_ == Cut::kNone) {
    weight.normal_(0, std, init.generator);
  } else {
    auto whole = weight.sizes().vec();
    const int64_t dim = cuts_inputs() ? 1 : 0;
    whole[static_cast<size_t>(dim)] *= ranks_->size();
    draw_weight(weight, whole, dim, *ranks_, std, init);
  }
  if (bias.defined()) bias.zero_();
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

}  // namespace megashard
