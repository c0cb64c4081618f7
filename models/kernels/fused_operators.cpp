#include "models/kernels/fused_operators.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "framework/matrix_product.h"
#include "models/kernels/attention_kernels.h"
#include "models/kernels/cpu_kernels.h"
#include "models/kernels/cross_entropy.h"
#include "models/kernels/gpu_operators.h"
#include "models/kernels/head_kernels.h"
#include "models/kernels/row_layout.h"

namespace megashard {
namespace {

using at::Tensor;
using TwoTensors = FusedOperators::TwoTensors;
using ThreeTensors = FusedOperators::ThreeTensors;

/// Calls body with a null pointer to the element type.
template <class Body>
void with_type(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) {
    body(static_cast<float*>(nullptr));
  } else if (x.scalar_type() == at::kHalf) {
    body(static_cast<c10::Half*>(nullptr));
  } else {
    body(static_cast<c10::BFloat16*>(nullptr));
  }
}
template <class T>
T* data(T* /*type*/, const Tensor& x) {
  return x.mutable_data_ptr<T>();
}

Tensor linear_by_fp32_on_cpu(const Tensor& x, const Tensor& weight) {
  const auto rows = x.reshape({-1, weight.size(1)}).to(at::kFloat);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return matrix_product(rows, weight.to(at::kFloat).t()).to(x.scalar_type()).view(sizes);
}

/// Normalises x, or x + branch, which is stored in `sum`. Returns y and 1 / rms of each row.
TwoTensors normed_on_cpu(const Tensor& x, const Tensor& branch, const Tensor& sum, const Tensor& weight, double eps) {
  const int64_t width = x.size(-1);
  const int64_t rows = width == 0 ? 0 : x.numel() / width;
  const Tensor y = at::empty_like(x), inverse_rms = at::empty({rows}, x.options().dtype(at::kFloat));
  const bool adds = branch.defined();
  with_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    kernels::rms_norm<T>(data(type, x), adds ? data(type, branch) : nullptr, adds ? data(type, sum) : nullptr,
                         data(type, weight), data(type, y), inverse_rms.mutable_data_ptr<float>(), rows, width,
                         static_cast<float>(eps));
  });
  return {y, inverse_rms};
}

TwoTensors rms_norm_on_cpu(const Tensor& x, const Tensor& weight, double eps) {
  return normed_on_cpu(x, {}, {}, weight, eps);
}

ThreeTensors add_rms_norm_on_cpu(const Tensor& residual, const Tensor& branch, const Tensor& weight, double eps) {
  const Tensor sum = at::empty_like(residual);
  const auto [y, inverse_rms] = normed_on_cpu(residual, branch, sum, weight, eps);
  return {sum, y, inverse_rms};
}

TwoTensors rms_norm_backward_on_cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                    const Tensor& inverse_rms, bool of_weight,
                                    const std::optional<Tensor>& grad_sum) {
  auto grad_x = at::empty_like(x);
  auto grad_weight = of_weight ? at::empty({x.size(-1)}, x.options().dtype(at::kFloat)) : Tensor();
  with_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    kernels::rms_norm_backward<T>(data(type, grad_y), data(type, x), data(type, weight),
                                  inverse_rms.const_data_ptr<float>(), grad_sum ? data(type, *grad_sum) : nullptr,
                                  data(type, grad_x), of_weight ? grad_weight.mutable_data_ptr<float>() : nullptr,
                                  inverse_rms.numel(), x.size(-1));
  });
  return {grad_x, grad_weight};
}

kernels::RotaryShape rotary_shape(const Tensor& x, const Tensor& cos) {
  return {.batch = x.size(0),
          .length = x.size(1),
          .heads = x.size(2),
          .head_dim = x.size(3),
          .rotary_dim = 2 * cos.size(-1),
          .stride_batch = x.stride(0),
          .stride_time = x.stride(1),
          .stride_head = x.stride(2),
          .table_per_batch = cos.dim() == 3 && cos.size(0) > 1};
}

void rotate_to_on_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back, Tensor& y) {
  const kernels::HeadStrides of_y{y.stride(0), y.stride(1), y.stride(2)};
  with_type(x, [&](auto* type) {
    kernels::rotate(data(type, x), data(type, cos), data(type, sin), data(type, y), rotary_shape(x, cos), of_y, back);
  });
}

Tensor rotate_on_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back) {
  auto y = at::empty(x.sizes(), x.options());
  rotate_to_on_cpu(x, cos, sin, back, y);
  return y;
}

template <class T>
kernels::HeadArrays<T> head_arrays(T* type, const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin,
                                   bool zero_centered) {
  return {data(type, x), data(type, weight), data(type, cos), data(type, sin), zero_centered};
}

TwoTensors norm_and_rotate_on_cpu(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin,
                                  double eps, bool zero_centered) {
  const Tensor y = at::empty(x.sizes(), x.options());
  const Tensor inverse_rms = at::empty({x.size(0), x.size(1), x.size(2)}, x.options().dtype(at::kFloat));
  with_type(x, [&](auto* type) {
    kernels::norm_and_rotate(head_arrays(type, x, weight, cos, sin, zero_centered), data(type, y),
                             inverse_rms.mutable_data_ptr<float>(), rotary_shape(x, cos), static_cast<float>(eps));
  });
  return {y, inverse_rms};
}

TwoTensors norm_and_rotate_backward_on_cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                           const Tensor& cos, const Tensor& sin, const Tensor& inverse_rms,
                                           bool zero_centered, bool of_weight) {
  const Tensor grad_x = at::empty(x.sizes(), x.options());
  const Tensor grad_weight = of_weight ? at::empty({x.size(-1)}, x.options().dtype(at::kFloat)) : Tensor();
  with_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    kernels::norm_and_rotate_backward<T>(data(type, grad_y), head_arrays(type, x, weight, cos, sin, zero_centered),
                                         inverse_rms.const_data_ptr<float>(), data(type, grad_x),
                                         of_weight ? grad_weight.mutable_data_ptr<float>() : nullptr,
                                         rotary_shape(x, cos));
  });
  return {grad_x, grad_weight};
}

Tensor swiglu_on_cpu(const Tensor& gate, const Tensor& up) {
  auto y = at::empty(gate.sizes(), gate.options());
  const RowLayout layout = *row_layout(gate);  // same for up
  with_type(gate, [&](auto* type) {
    kernels::swiglu(data(type, gate), data(type, up), data(type, y), layout.rows, layout.width, layout.stride);
  });
  return y;
}

TwoTensors swiglu_gradients_on_cpu(const Tensor& grad_y, const Tensor& gate, const Tensor& up, bool leaves_product) {
  const RowLayout layout = *row_layout(gate);  // same for up
  auto grads = empty_pair_like(gate);
  with_type(gate, [&](auto* type) {
    auto* const y = leaves_product ? data(type, grad_y) : nullptr;
    kernels::swiglu_backward(data(type, grad_y), data(type, gate), data(type, up), data(type, std::get<0>(grads)),
                             data(type, std::get<1>(grads)), y, layout.rows, layout.width, layout.stride);
  });
  return grads;
}

TwoTensors swiglu_backward_on_cpu(const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return swiglu_gradients_on_cpu(grad_y, gate, up, false);
}

TwoTensors swiglu_backward_in_place_on_cpu(Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return swiglu_gradients_on_cpu(grad_y, gate, up, true);
}

TwoTensors cross_entropy_on_cpu(const Tensor& logits, const Tensor& labels) {
  const int64_t rows = logits.size(0);
  auto loss = at::empty({rows}, logits.options().dtype(at::kFloat));
  auto stats = at::empty({rows, 2}, loss.options());
  with_type(logits, [&](auto* type) {
    kernels::cross_entropy(data(type, logits), labels.const_data_ptr<int64_t>(), loss.mutable_data_ptr<float>(),
                           stats.mutable_data_ptr<float>(), rows, logits.size(1));
  });
  return {loss, stats};
}

void cross_entropy_backward_on_cpu(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss) {
  with_type(logits, [&](auto* type) {
    kernels::cross_entropy_backward_(data(type, logits), labels.const_data_ptr<int64_t>(),
                                     stats.const_data_ptr<float>(), grad_loss.const_data_ptr<float>(), logits.size(0),
                                     logits.size(1), kIgnoredLabel);
  });
}

template <class T>
flash_attention::Heads<T> heads(T* type, const Tensor& x) {
  return {data(type, x), x.stride(0), x.stride(1), x.stride(2)};
}

flash_attention::Shape attention_shape(const Tensor& q, const Tensor& k, const std::optional<Tensor>& key_begins,
                                       const std::optional<Tensor>& key_ends, int64_t window, double scale) {
  return {.batch = q.size(0),
          .length = q.size(1),
          .heads = q.size(2),
          .key_heads = k.size(2),
          .head_dim = q.size(3),
          .window = window,
          .key_begins = key_begins ? key_begins->const_data_ptr<int64_t>() : nullptr,
          .key_ends = key_ends ? key_ends->const_data_ptr<int64_t>() : nullptr,
          .scale = static_cast<float>(scale)};
}

/// One row per thread, aligned to 64 bytes as all of LibTorch's memory.
Tensor scratch_of(int64_t floats, const Tensor& like) {
  return at::empty({at::get_num_threads(), floats}, like.options().dtype(at::kFloat));
}

TwoTensors attention_on_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_begins,
                            const std::optional<Tensor>& key_ends, int64_t window, double scale) {
  const auto shape = attention_shape(q, k, key_begins, key_ends, window, scale);
  const Tensor out = at::empty(q.sizes(), q.options());
  const Tensor lse = at::empty({shape.batch, shape.heads, shape.length}, q.options().dtype(at::kFloat));
  const Tensor scratch = scratch_of(flash_attention::forward_scratch(shape), q);
  with_type(q, [&](auto* type) {
    flash_attention::forward(heads(type, q), heads(type, k), heads(type, v), heads(type, out),
                             lse.mutable_data_ptr<float>(), shape, scratch.mutable_data_ptr<float>());
  });
  return {out, lse};
}

ThreeTensors attention_backward_on_cpu(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& out, const Tensor& lse, const std::optional<Tensor>& key_begins,
                                       const std::optional<Tensor>& key_ends, int64_t window, double scale) {
  const auto shape = attention_shape(q, k, key_begins, key_ends, window, scale);
  const Tensor grad_q = at::empty(q.sizes(), q.options()), grad_k = at::empty(k.sizes(), k.options()),
               grad_v = at::empty(v.sizes(), v.options());
  const Tensor scratch = scratch_of(flash_attention::backward_scratch(shape), q);
  with_type(q, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const flash_attention::Gradients<T> grads{heads(type, grad_q), heads(type, grad_k), heads(type, grad_v)};
    flash_attention::backward(heads(type, grad_out), heads(type, q), heads(type, k), heads(type, v), heads(type, out),
                              lse.const_data_ptr<float>(), grads, shape, scratch.mutable_data_ptr<float>());
  });
  return {grad_q, grad_k, grad_v};
}

constexpr const char* kFusedOperators[] = {
    "linear_by_fp32",  "rms_norm",      "add_rms_norm",            "rms_norm_backward", "rotate", "swiglu",
    "swiglu_backward", "cross_entropy", "cross_entropy_backward_", "attention",         "attention_backward",
    "norm_and_rotate", "norm_and_rotate_backward", "swiglu_backward_", "rotate_to"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(megashard, library) {
  library.def("linear_by_fp32(Tensor x, Tensor weight) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("add_rms_norm(Tensor residual, Tensor branch, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)");
  library.def("rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor inverse_rms, bool "
              "of_weight, Tensor? grad_sum) -> (Tensor, Tensor)");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor");
  library.def("rotate_to(Tensor x, Tensor cos, Tensor sin, bool back, Tensor(a!) y) -> ()");
  library.def("norm_and_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, bool zero_centered)"
              " -> (Tensor, Tensor)");
  library.def("norm_and_rotate_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor cos, Tensor sin, "
              "Tensor inverse_rms, bool zero_centered, bool of_weight) -> (Tensor, Tensor)");
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor grad_y, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("swiglu_backward_(Tensor(a!) grad_y, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)");
  library.def("cross_entropy_backward_(Tensor(a!) logits, Tensor labels, Tensor stats, Tensor grad_loss)"
              " -> ()");
  library.def("attention(Tensor q, Tensor k, Tensor v, Tensor? key_begins, Tensor? key_ends, int window, float scale)"
              " -> (Tensor, Tensor)");
  library.def("attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
              "Tensor? key_begins, Tensor? key_ends, int window, float scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(megashard, CPU, library) {
  library.impl("linear_by_fp32", &linear_by_fp32_on_cpu);
  library.impl("attention", &attention_on_cpu);
  library.impl("attention_backward", &attention_backward_on_cpu);
  if (cpu_takes_row_kernels_of_gpu()) return register_row_kernels_of_gpu(library);
  library.impl("rms_norm", &rms_norm_on_cpu);
  library.impl("add_rms_norm", &add_rms_norm_on_cpu);
  library.impl("rms_norm_backward", &rms_norm_backward_on_cpu);
  library.impl("rotate", &rotate_on_cpu);
  library.impl("rotate_to", &rotate_to_on_cpu);
  library.impl("norm_and_rotate", &norm_and_rotate_on_cpu);
  library.impl("norm_and_rotate_backward", &norm_and_rotate_backward_on_cpu);
  library.impl("swiglu", &swiglu_on_cpu);
  library.impl("swiglu_backward", &swiglu_backward_on_cpu);
  library.impl("swiglu_backward_", &swiglu_backward_in_place_on_cpu);
  library.impl("cross_entropy", &cross_entropy_on_cpu);
  library.impl("cross_entropy_backward_", &cross_entropy_backward_on_cpu);
}

// fused_ops.cpp defines the gradients; LibTorch's default kernel for this key would box every call.
TORCH_LIBRARY_IMPL(megashard, Autograd, library) {
  for (const char* name : kFusedOperators) library.impl(name, torch::CppFunction::makeFallthrough());
}

const FusedOperators& fused_operators() {
  static const FusedOperators operators;
  return operators;
}

}  // namespace megashard
