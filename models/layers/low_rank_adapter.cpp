#include "models/layers/low_rank_adapter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>

#include <cmath>

#include "models/kernels/fused_ops.h"

namespace megashard {

double lora_init_bound(int64_t in) { return 1 / std::sqrt(static_cast<double>(in)); }

void LowRankAdapter::add_to(Linear& layer, int64_t rank, double scale, double dropout) {
  const auto adapter = std::make_shared<LowRankAdapter>();
  const int64_t out = layer.weight.size(0), in = layer.weight.size(1);
  adapter->base_ = layer.compute();
  adapter->scale_ = scale;
  adapter->dropout_ = dropout;
  const auto part = [&layer](const char* name, int64_t from, int64_t to) {
    return layer.register_module(name, std::make_shared<Hooked<Linear>>(Linear::Options{.in = from, .out = to}));
  };
  adapter->lora_a_ = part("lora_A", in, rank);
  adapter->lora_b_ = part("lora_B", rank, out);
  const at::NoGradGuard no_grad;
  adapter->lora_a_->weight.uniform_(-lora_init_bound(in), lora_init_bound(in));
  adapter->lora_b_->weight.zero_();
  layer.set_compute(adapter);
}

const LowRankAdapter* LowRankAdapter::of(const Linear& layer) {
  return dynamic_cast<const LowRankAdapter*>(layer.compute().get());
}

at::Tensor LowRankAdapter::forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto y = base_ == nullptr ? linear(x, weight, bias) : base_->forward(x, weight, bias);
  const bool drops = lora_a_->is_training() && dropout_ > 0;
  const auto narrow = lora_a_->forward(drops ? at::dropout(x, dropout_, /*train=*/true) : x);
  return at::add(y, lora_b_->forward(narrow), scale_);
}

}  // namespace megashard
