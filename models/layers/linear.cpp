#include "models/layers/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "models/kernels/fused_ops.h"

namespace megashard {

Linear::Linear(const Options& options) : init_scale_(options.init_scale), tied_(options.tied) {
  weight = register_parameter("weight", at::empty({options.out, options.in}));
  if (options.bias) bias = register_parameter("bias", at::empty({options.out}));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  auto y = linear(x, tied_ ? with_own_gradient(weight) : weight, bias);
  if (!has_adapter()) return y;
  const bool drops = is_training() && adapter_dropout_ > 0;
  const auto narrow = lora_a_->forward(drops ? at::dropout(x, adapter_dropout_, true) : x);
  return at::add(y, lora_b_->forward(narrow), adapter_scale_);
}

void Linear::add_adapter(int64_t rank, double scale, double dropout) {
  const int64_t in = weight.size(1);
  adapter_scale_ = scale;
  adapter_dropout_ = dropout;
  lora_a_ = register_module("lora_A", std::make_shared<Hooked<Linear>>(Options{.in = in, .out = rank}));
  lora_b_ = register_module("lora_B", std::make_shared<Hooked<Linear>>(Options{.in = rank, .out = weight.size(0)}));
  const at::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(in));  // Kaiming's, a = sqrt(5)
  lora_a_->weight.uniform_(-bound, bound);
  lora_b_->weight.zero_();
}

void Linear::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std * init_scale_, init.generator);
  if (bias.defined()) bias.zero_();
}

Embedding::Embedding(int64_t rows, int64_t width, std::optional<int64_t> padding_index)
    : rows_(rows), padding_index_(padding_index) {
  weight = register_parameter("weight", at::empty({rows, width}));
}

at::Tensor Embedding::forward(const at::Tensor& indices) {
  TORCH_CHECK(indices.scalar_type() == at::kLong, "embedding indices must be int64, got ", indices.scalar_type());
  if (indices.device().is_cpu()) {  // on a GPU the check would stall the stream; the kernel asserts there
    const auto flat = indices.contiguous();
    const auto* index = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(index[i] >= 0 && index[i] < rows_, "token or position ", index[i], " lies outside an embedding of ",
                  rows_,
                  " rows: the data were tokenised with another tokenizer than the model's, or are too long for it");
    }
  }
  return at::embedding(weight, indices, padding_index_.value_or(-1));
}

void Embedding::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std, init.generator);
  if (padding_index_) weight.select(0, *padding_index_).zero_();
}

}  // namespace megashard
