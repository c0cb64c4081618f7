#include "models/kernels/gpu_operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdlib>
#include <string_view>

#include "models/kernels/cross_entropy.h"
#include "models/kernels/gpu/cross_entropy_grad_rows.h"
#include "models/kernels/gpu/gpu_kernels.h"
#include "models/kernels/gpu/head_norm_grad_rows.h"
#include "models/kernels/gpu/head_norm_rows.h"
#include "models/kernels/gpu/rms_norm_grad_rows.h"
#include "models/kernels/gpu/rotary_threads.h"
#include "models/kernels/gpu/swiglu_threads.h"
#include "models/kernels/row_layout.h"

namespace megashard {
namespace gpu {
namespace {

const GpuKernels& kernels_of(const Tensor& x) { return x.is_cpu() ? host_kernels() : gpu_kernels(); }

FloatFormat format_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return FloatFormat::kFloat;
    case at::kBFloat16:
      return FloatFormat::kBFloat16;
    case at::kHalf:
      return FloatFormat::kHalf;
    default:
      TORCH_CHECK(false, "the row kernels compute fp32, bf16 and fp16, not ", x.scalar_type(), ": convert the input");
  }
}

/// True if all tensors are aligned to 16 bytes and these numbers of elements are whole vectors.
bool in_vectors(std::initializer_list<Tensor> tensors, std::initializer_list<int64_t> numels) {
  const auto size = static_cast<int64_t>(tensors.begin()->element_size());
  bool fits = true;
  for (const Tensor& each : tensors) fits &= reinterpret_cast<uintptr_t>(each.const_data_ptr()) % 16 == 0;
  for (const int64_t numel : numels) fits &= numel * size % 16 == 0;
  return fits;
}

/// Contiguous tensors are one row.
SwigluRows swiglu_rows(const Tensor& gate) {
  const RowLayout layout = *row_layout(gate);
  const bool dense = layout.stride == layout.width;
  return dense ? SwigluRows{1, gate.numel(), gate.numel()} : SwigluRows{layout.rows, layout.width, layout.stride};
}

bool swiglu_in_vectors(std::initializer_list<Tensor> tensors, const SwigluRows& shape) {
  return shape.rows == 1 ? in_vectors(tensors, {}) : in_vectors(tensors, {shape.width, shape.stride});
}

Tensor floats(at::IntArrayRef sizes, const Tensor& like) { return at::empty(sizes, like.options().dtype(at::kFloat)); }

/// Normalises x, or x + branch, which is stored in `sum`. Returns y and 1 / rms of each row.
TwoTensors normed(const Tensor& x, const Tensor& branch, const Tensor& sum, const Tensor& weight, double eps) {
  const c10::DeviceGuard guard(x.device());
  const int64_t width = x.size(-1), rows = width == 0 ? 0 : x.numel() / width;
  const Tensor y = at::empty_like(x), inverse_rms = floats({rows}, x);
  const bool adds = branch.defined();
  kernels_of(x).rms_norm({.x = x.const_data_ptr(),
                          .branch = adds ? branch.const_data_ptr() : nullptr,
                          .sum = adds ? sum.mutable_data_ptr() : nullptr,
                          .weight = weight.const_data_ptr(),
                          .y = y.mutable_data_ptr(),
                          .inverse_rms = inverse_rms.mutable_data_ptr<float>(),
                          .rows = rows,
                          .width = width,
                          .eps = static_cast<float>(eps),
                          .format = format_of(x),
                          .vectors = in_vectors({x, adds ? branch : x, adds ? sum : x, weight, y}, {width})});
  return {y, inverse_rms};
}

}  // namespace

TwoTensors rms_norm(const Tensor& x, const Tensor& weight, double eps) { return normed(x, {}, {}, weight, eps); }

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& residual, const Tensor& branch, const Tensor& weight,
                                                double eps) {
  const c10::DeviceGuard guard(residual.device());
  const Tensor sum = at::empty_like(residual);
  const auto [y, inverse_rms] = normed(residual, branch, sum, weight, eps);
  return {sum, y, inverse_rms};
}

TwoTensors rms_norm_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                             bool of_weight, const std::optional<Tensor>& grad_sum) {
  const c10::DeviceGuard guard(x.device());
  const int64_t width = x.size(-1), rows = inverse_rms.numel();
  const Tensor grad_x = at::empty_like(x);
  const FloatFormat format = format_of(x);
  const bool vectors = in_vectors({grad_y, x, weight, grad_sum ? *grad_sum : grad_x, grad_x}, {width});
  const int64_t groups = norm_grad_groups(rows, width, format, vectors);
  const Tensor partial = of_weight ? floats({groups, width}, x) : Tensor();
  const Tensor grad_weight = of_weight ? floats({width}, x) : Tensor();
  kernels_of(x).rms_norm_grad({.grad_y = grad_y.const_data_ptr(),
                               .x = x.const_data_ptr(),
                               .weight = weight.const_data_ptr(),
                               .inverse_rms = inverse_rms.const_data_ptr<float>(),
                               .grad_sum = grad_sum ? grad_sum->const_data_ptr() : nullptr,
                               .grad_x = grad_x.mutable_data_ptr(),
                               .partial = of_weight ? partial.mutable_data_ptr<float>() : nullptr,
                               .grad_weight = of_weight ? grad_weight.mutable_data_ptr<float>() : nullptr,
                               .rows = rows,
                               .width = width,
                               .groups = groups,
                               .format = format,
                               .vectors = vectors});
  return {grad_x, grad_weight};
}

void rotate_to(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back, Tensor& y) {
  const c10::DeviceGuard guard(x.device());
  const int64_t half = cos.size(-1);
  kernels_of(x).rotate(
      {.x = x.const_data_ptr(),
       .cos = cos.const_data_ptr(),
       .sin = sin.const_data_ptr(),
       .y = y.mutable_data_ptr(),
       .batch = x.size(0),
       .length = x.size(1),
       .of_x = {x.stride(0), x.stride(1), x.stride(2)},
       .of_y = {y.stride(0), y.stride(1), y.stride(2)},
       .heads = static_cast<int32_t>(x.size(2)),
       .head_dim = static_cast<int32_t>(x.size(3)),
       .half = static_cast<int32_t>(half),
       .table_per_batch = cos.dim() == 3 && cos.size(0) > 1,
       .back = back,
       .format = format_of(x),
       .vectors = in_vectors({x, cos, sin, y}, {x.stride(0), x.stride(1), x.stride(2), y.stride(0), y.stride(1),
                                                y.stride(2), x.size(3), half})});
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back) {
  Tensor y = at::empty(x.sizes(), x.options());
  rotate_to(x, cos, sin, back, y);
  return y;
}

namespace {

HeadShape head_shape(const Tensor& x, const Tensor& cos, bool zero_centered, bool at_vectors) {
  const int64_t half = cos.size(-1);
  return {.tokens = x.size(0) * x.size(1),
          .length = x.size(1),
          .stride_batch = x.stride(0),
          .stride_time = x.stride(1),
          .stride_head = x.stride(2),
          .heads = static_cast<int32_t>(x.size(2)),
          .head_dim = static_cast<int32_t>(x.size(3)),
          .half = static_cast<int32_t>(half),
          .table_per_batch = cos.dim() == 3 && cos.size(0) > 1,
          .zero_centered = zero_centered,
          .format = format_of(x),
          .vectors = at_vectors && in_vectors({x}, {x.stride(0), x.stride(1), x.stride(2), x.size(3), half})};
}

}  // namespace

TwoTensors norm_and_rotate(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
                           bool zero_centered) {
  const c10::DeviceGuard guard(x.device());
  const Tensor y = at::empty(x.sizes(), x.options()), inverse_rms = floats({x.size(0), x.size(1), x.size(2)}, x);
  kernels_of(x).head_norm({.x = x.const_data_ptr(),
                           .weight = weight.const_data_ptr(),
                           .cos = cos.const_data_ptr(),
                           .sin = sin.const_data_ptr(),
                           .y = y.mutable_data_ptr(),
                           .inverse_rms = inverse_rms.mutable_data_ptr<float>(),
                           .eps = static_cast<float>(eps),
                           .shape = head_shape(x, cos, zero_centered, in_vectors({y, weight, cos, sin}, {}))});
  return {y, inverse_rms};
}

TwoTensors norm_and_rotate_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& cos,
                                    const Tensor& sin, const Tensor& inverse_rms, bool zero_centered, bool of_weight) {
  const c10::DeviceGuard guard(x.device());
  const Tensor grad_x = at::empty(x.sizes(), x.options());
  const HeadShape shape =
      head_shape(x, cos, zero_centered, in_vectors({grad_x, grad_y, weight, cos, sin}, {}));
  const int64_t groups = head_grad_groups(shape);
  const Tensor partial = of_weight ? floats({groups, x.size(-1)}, x) : Tensor();
  const Tensor grad_weight = of_weight ? floats({x.size(-1)}, x) : Tensor();
  kernels_of(x).head_norm_grad({.grad_y = grad_y.const_data_ptr(),
                                .x = x.const_data_ptr(),
                                .weight = weight.const_data_ptr(),
                                .cos = cos.const_data_ptr(),
                                .sin = sin.const_data_ptr(),
                                .inverse_rms = inverse_rms.const_data_ptr<float>(),
                                .grad_x = grad_x.mutable_data_ptr(),
                                .partial = of_weight ? partial.mutable_data_ptr<float>() : nullptr,
                                .grad_weight = of_weight ? grad_weight.mutable_data_ptr<float>() : nullptr,
                                .groups = groups,
                                .shape = shape});
  return {grad_x, grad_weight};
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const c10::DeviceGuard guard(gate.device());
  const SwigluRows shape = swiglu_rows(gate);
  const Tensor y = at::empty(gate.sizes(), gate.options());
  kernels_of(gate).swiglu({.gate = gate.const_data_ptr(),
                           .up = up.const_data_ptr(),
                           .y = y.mutable_data_ptr(),
                           .shape = shape,
                           .format = format_of(gate),
                           .vectors = swiglu_in_vectors({gate, up, y}, shape)});
  return y;
}

namespace {

TwoTensors swiglu_gradients(const Tensor& grad_y, const Tensor& gate, const Tensor& up, void* y) {
  const c10::DeviceGuard guard(gate.device());
  const SwigluRows shape = swiglu_rows(gate);
  const auto [grad_gate, grad_up] = empty_pair_like(gate);
  kernels_of(gate).swiglu_grad({.grad_y = grad_y.const_data_ptr(),
                                .gate = gate.const_data_ptr(),
                                .up = up.const_data_ptr(),
                                .grad_gate = grad_gate.mutable_data_ptr(),
                                .grad_up = grad_up.mutable_data_ptr(),
                                .y = y,
                                .shape = shape,
                                .format = format_of(gate),
                                .vectors = swiglu_in_vectors({grad_y, gate, up, grad_gate, grad_up}, shape)});
  return {grad_gate, grad_up};
}

}  // namespace

TwoTensors swiglu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return swiglu_gradients(grad_y, gate, up, nullptr);
}

TwoTensors swiglu_backward_(Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return swiglu_gradients(grad_y, gate, up, grad_y.mutable_data_ptr());
}

TwoTensors cross_entropy(const Tensor& logits, const Tensor& labels) {
  const c10::DeviceGuard guard(logits.device());
  const int64_t rows = logits.size(0);
  const Tensor loss = floats({rows}, logits), stats = floats({rows, 2}, logits);
  kernels_of(logits).cross_entropy({.logits = logits.const_data_ptr(),
                                    .labels = labels.const_data_ptr<int64_t>(),
                                    .loss = loss.mutable_data_ptr<float>(),
                                    .stats = stats.mutable_data_ptr<float>(),
                                    .rows = rows,
                                    .width = logits.size(1),
                                    .format = format_of(logits)});
  return {loss, stats};
}

void cross_entropy_backward_(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss) {
  const c10::DeviceGuard guard(logits.device());
  kernels_of(logits).cross_entropy_grad({.logits = logits.mutable_data_ptr(),
                                         .labels = labels.const_data_ptr<int64_t>(),
                                         .stats = stats.const_data_ptr<float>(),
                                         .grad_loss = grad_loss.const_data_ptr<float>(),
                                         .rows = logits.size(0),
                                         .width = logits.size(1),
                                         .ignored = kIgnoredLabel,
                                         .format = format_of(logits)});
}

}  // namespace gpu

void register_row_kernels_of_gpu(torch::Library& library) {
  library.impl("rms_norm", &gpu::rms_norm);
  library.impl("add_rms_norm", &gpu::add_rms_norm);
  library.impl("rms_norm_backward", &gpu::rms_norm_backward);
  library.impl("rotate", &gpu::rotate);
  library.impl("rotate_to", &gpu::rotate_to);
  library.impl("norm_and_rotate", &gpu::norm_and_rotate);
  library.impl("norm_and_rotate_backward", &gpu::norm_and_rotate_backward);
  library.impl("swiglu", &gpu::swiglu);
  library.impl("swiglu_backward", &gpu::swiglu_backward);
  library.impl("swiglu_backward_", &gpu::swiglu_backward_);
  library.impl("cross_entropy", &gpu::cross_entropy);
  library.impl("cross_entropy_backward_", &gpu::cross_entropy_backward_);
}

bool cpu_takes_row_kernels_of_gpu() {
  const char* given = std::getenv("MEGASHARD_CPU_ROW_KERNELS");
  return given != nullptr && std::string_view(given) == "gpu";
}

TORCH_LIBRARY_IMPL(megashard, CUDA, library) { register_row_kernels_of_gpu(library); }

}  // namespace megashard
