#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "framework/dispatched_operator.h"

/// The fused functions and their gradients as operators of LibTorch's dispatcher, with kernels for some backends. CPUs
/// have all, GPUs those of gpu_operators.h. fused_operators.cpp has the schemas with names and outputs; another library
/// may register kernels for its backend.
namespace megashard {

/// Tensors are contiguous except: x of rotations and y of rotate_to, whose last dimension is contiguous, and gate and
/// up, which share a row_layout with their gradients.
struct FusedOperators {
  using Tensor = at::Tensor;
  using TwoTensors = std::tuple<Tensor, Tensor>;
  using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

  DispatchedOperator<Tensor(const Tensor& x, const Tensor& weight)> linear_by_fp32{"megashard::linear_by_fp32"};
  /// Returns y and 1 / rms of each row, fp32.
  DispatchedOperator<TwoTensors(const Tensor& x, const Tensor& weight, double eps)> rms_norm{"megashard::rms_norm"};
  /// Returns residual + branch, and its y and 1 / rms as rms_norm.
  DispatchedOperator<ThreeTensors(const Tensor& residual, const Tensor& branch, const Tensor& weight, double eps)>
      add_rms_norm{"megashard::add_rms_norm"};
  /// Gradients of x, with grad_sum added if given, and of the weight, fp32, undefined unless of_weight.
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                                bool of_weight, const std::optional<Tensor>& grad_sum)>
      rms_norm_backward{"megashard::rms_norm_backward"};
  /// `back` rotates by the opposite angle.
  DispatchedOperator<Tensor(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back)> rotate{
      "megashard::rotate"};
  /// Writes to y, with x's sizes; y may be x.
  DispatchedOperator<void(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back, Tensor& y)> rotate_to{
      "megashard::rotate_to"};
  /// rotate of rms_norm over each head, with at most 256 channels; zero_centered as in HeadArrays. Returns y,
  /// contiguous, and 1 / rms of each head, fp32.
  DispatchedOperator<TwoTensors(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
                                bool zero_centered)>
      norm_and_rotate{"megashard::norm_and_rotate"};
  /// grad_y is contiguous. Gradients of x, contiguous, and of the weight, as rms_norm_backward.
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& cos,
                                const Tensor& sin, const Tensor& inverse_rms, bool zero_centered, bool of_weight)>
      norm_and_rotate_backward{"megashard::norm_and_rotate_backward"};
  DispatchedOperator<Tensor(const Tensor& gate, const Tensor& up)> swiglu{"megashard::swiglu"};
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& gate, const Tensor& up)> swiglu_backward{
      "megashard::swiglu_backward"};
  /// As swiglu_backward; overwrites grad_y by swiglu(gate, up).
  DispatchedOperator<TwoTensors(Tensor& grad_y, const Tensor& gate, const Tensor& up)> swiglu_backward_{
      "megashard::swiglu_backward_"};
  /// Returns the loss of each row, fp32, and statistics for the gradient.
  DispatchedOperator<TwoTensors(const Tensor& logits, const Tensor& labels)> cross_entropy{"megashard::cross_entropy"};
  /// Overwrites logits by their gradient.
  DispatchedOperator<void(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss)>
      cross_entropy_backward_{"megashard::cross_entropy_backward_"};
  /// attention_kernels.h for contiguous last dimensions. Returns the weighted values and the log-sum-exp [B, H, T],
  /// fp32.
  DispatchedOperator<TwoTensors(const Tensor& q, const Tensor& k, const Tensor& v,
                                const std::optional<Tensor>& key_begins, const std::optional<Tensor>& key_ends,
                                int64_t window, double scale)>
      attention{"megashard::attention"};
  DispatchedOperator<ThreeTensors(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& out, const Tensor& lse, const std::optional<Tensor>& key_begins,
                                  const std::optional<Tensor>& key_ends, int64_t window, double scale)>
      attention_backward{"megashard::attention_backward"};
};

/// The operators, looked up once.
const FusedOperators& fused_operators();

/// True if x's backend has a kernel of the operator and it supports x's dtype.
template <class Operator>
bool has_kernel(const Operator& fused, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && fused.runs_on(x);
}

}  // namespace megashard
