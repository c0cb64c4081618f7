#include "models/layers/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "models/kernels/fused_ops.h"
#include "models/kernels/linear_products.h"

namespace megashard {

double lora_init_bound(int64_t in) { return 1 / std::sqrt(static_cast<double>(in)); }

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
  if (lora_a_ == nullptr) return y;
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

}  // namespace megashard
