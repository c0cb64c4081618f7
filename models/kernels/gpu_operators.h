#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace torch {
class Library;
}

namespace megashard {

/// The operators of fused_operators.h with the row kernels of gpu/: launched on the current stream of a GPU, or in
/// their host form on a CPU, for fp32, bf16 and fp16. They allocate their results, and rms_norm_backward the partial
/// sums of the weight's gradient. Do not block the host.
namespace gpu {

using at::Tensor;
using TwoTensors = std::tuple<Tensor, Tensor>;

TwoTensors rms_norm(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& residual, const Tensor& branch, const Tensor& weight,
                                                double eps);
TwoTensors rms_norm_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                             bool of_weight, const std::optional<Tensor>& grad_sum);
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back);
void rotate_to(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back, Tensor& y);
TwoTensors norm_and_rotate(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
                           bool zero_centered);
TwoTensors norm_and_rotate_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& cos,
                                    const Tensor& sin, const Tensor& inverse_rms, bool zero_centered, bool of_weight);
Tensor swiglu(const Tensor& gate, const Tensor& up);
TwoTensors swiglu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up);
TwoTensors swiglu_backward_(Tensor& grad_y, const Tensor& gate, const Tensor& up);
TwoTensors cross_entropy(const Tensor& logits, const Tensor& labels);
void cross_entropy_backward_(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss);

}  // namespace gpu

/// Registers them for the backend of `library`. They are already registered for CUDA.
void register_row_kernels_of_gpu(torch::Library& library);

/// MEGASHARD_CPU_ROW_KERNELS=gpu: CPUs use the host form of the GPU's row kernels, with the bits of the simulated
/// device. One core, scalar: for comparisons.
bool cpu_takes_row_kernels_of_gpu();

}  // namespace megashard
