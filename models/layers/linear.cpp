#include "models/layers/linear.h"

#include <ATen/ops/empty.h>

#include "models/kernels/fused_ops.h"
#include "models/kernels/swiglu_linear.h"

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
  return compute_ == nullptr ? linear(x, w, b) : compute_->forward(x, w, b);
}

void Linear::init_own_weights(const WeightInit& init) {
  weight.normal_(0, init.std * init_scale_, init.generator);
  if (bias.defined()) bias.zero_();
}

}  // namespace megashard
