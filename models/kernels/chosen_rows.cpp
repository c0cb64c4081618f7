#include "models/kernels/chosen_rows.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "models/kernels/once_differentiable.h"
#include "parallel/lanes/instructions.h"

namespace megashard {
namespace chosen_rows {
namespace {

#define MEGASHARD_WITH_LANES "models/kernels/chosen_rows.inc"
#include "parallel/lanes/each_instruction_set.inc"
#undef MEGASHARD_WITH_LANES

struct Sizes {
  int64_t tokens, choices, width;
};

template <class Body>
void for_tokens(const Sizes& sizes, const Body& body) {
  constexpr int64_t kGrain = 1 << 15;  // minimum number of elements per thread
  at::parallel_for(0, sizes.tokens, 1 + kGrain / (1 + sizes.choices * sizes.width), body);
}

template <class T>
void sum(const T* x, const int64_t* places, const T* weights, T* y, const Sizes& sizes) {
  for_tokens(sizes, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * sizes.choices;
    MEGASHARD_RUN(SumRows, x, places + first, weights == nullptr ? nullptr : weights + first, y + begin * sizes.width,
                  end - begin, sizes.choices, sizes.width);
  });
}

template <class T>
void sum_backward(const T* grad, const T* x, const int64_t* places, const T* weights, T* grad_x, T* grad_weights,
                  const Sizes& sizes) {
  for_tokens(sizes, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * sizes.choices;
    MEGASHARD_RUN(SumRowsBackward, grad + begin * sizes.width, x, places + first, weights + first, grad_x,
                  grad_weights + first, end - begin, sizes.choices, sizes.width);
  });
}
#undef MEGASHARD_RUN

bool has_kernel_for(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat; }

Sizes sizes_of(const at::Tensor& x, const at::Tensor& place) { return {place.size(0), place.size(1), x.size(1)}; }

at::Tensor summed(const at::Tensor& x, const at::Tensor& place, const at::Tensor* weights) {
  const auto y = at::empty({place.size(0), x.size(1)}, x.options());
  sum(x.const_data_ptr<float>(), place.const_data_ptr<int64_t>(),
      weights == nullptr ? nullptr : weights->const_data_ptr<float>(), y.mutable_data_ptr<float>(), sizes_of(x, place));
  return y;
}

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct WeightedSum : torch::autograd::Function<WeightedSum> {
  static Variable forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& place,
                          const at::Tensor& weights_in) {
    const auto x = x_in.contiguous(), weights = weights_in.contiguous();
    context->save_for_backward({x, place, weights});
    return summed(x, place, &weights);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require_once_differentiated("weighted_sum_of_rows");
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &place = saved[1], &weights = saved[2];
    const auto grad = grads[0].contiguous();
    const auto of_x = at::empty(x.sizes(), x.options()), of_weights = at::empty(weights.sizes(), weights.options());
    sum_backward(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), place.const_data_ptr<int64_t>(),
                 weights.const_data_ptr<float>(), of_x.mutable_data_ptr<float>(), of_weights.mutable_data_ptr<float>(),
                 sizes_of(x, place));
    return {of_x, Variable(), of_weights};
  }
};

at::Tensor chosen(const at::Tensor& x, const at::Tensor& place) {
  return x.index_select(0, place.flatten()).view({place.size(0), place.size(1), x.size(1)});
}

}  // namespace
}  // namespace chosen_rows

at::Tensor weighted_sum_of_rows(const at::Tensor& x, const at::Tensor& place, const at::Tensor& weights) {
  if (chosen_rows::has_kernel_for(x) && chosen_rows::has_kernel_for(weights))
    return chosen_rows::WeightedSum::apply(x, place, weights);
  return (chosen_rows::chosen(x, place) * weights.unsqueeze(-1)).sum(1);
}

at::Tensor sum_of_rows(const at::Tensor& x, const at::Tensor& place) {
  if (chosen_rows::has_kernel_for(x)) return chosen_rows::summed(x.contiguous(), place, nullptr);
  return chosen_rows::chosen(x, place).sum(1);
}

}  // namespace megashard
