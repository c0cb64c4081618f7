#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "framework/dispatched_operator.h"

/// The fused functions and their gradients as operators of LibTorch's dispatcher, where a backend
/// has kernels for them or not. CPUs have all, GPUs those of gpu_operators.h; the names and what each
/// operator writes are in the schemas of fused_operators.cpp, and a module may register another
/// backend's kernels for them.
namespace megashard {

/// Tensors are contiguous but for the x of what rotates and rotate_to's y, whose last dimension is dense, and for gate
/// and up, which have one row_layout; their gradients have it too.
struct FusedOperators {
  using Tensor = at::Tensor;
  using TwoTensors = std::tuple<Tensor, Tensor>;
  using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

  DispatchedOperator<Tensor(const Tensor& x, const Tensor& weight)> linear_by_fp32{"megashard::linear_by_fp32"};
  /// y; 1 / rms of each row, fp32.
  DispatchedOperator<TwoTensors(const Tensor& x, const Tensor& weight, double eps)> rms_norm{"megashard::rms_norm"};
  /// residual + branch; its y and 1 / rms as of rms_norm.
  DispatchedOperator<ThreeTensors(const Tensor& residual, const Tensor& branch, const Tensor& weight, double eps)>
      add_rms_norm{"megashard::add_rms_norm"};
  /// Of x, to which grad_sum is added if given; of the weight, fp32, undefined unless asked for.
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                                bool of_weight, const std::optional<Tensor>& grad_sum)>
      rms_norm_backward{"megashard::rms_norm_backward"};
  /// `back` turns by the opposite angle.
  DispatchedOperator<Tensor(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back)> rotate{
      "megashard::rotate"};
  /// Into y, of x's sizes, which may be x.
  DispatchedOperator<void(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back, Tensor& y)> rotate_to{
      "megashard::rotate_to"};
  /// rotate of rms_norm over each head, of 256 channels at most; zero_centered as HeadArrays has it. y, dense; 1 / rms
  /// of each head, fp32.
  DispatchedOperator<TwoTensors(const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
                                bool zero_centered)>
      norm_and_rotate{"megashard::norm_and_rotate"};
  /// grad_y is contiguous. Of x, dense; of the weight, as rms_norm_backward.
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& cos,
                                const Tensor& sin, const Tensor& inverse_rms, bool zero_centered, bool of_weight)>
      norm_and_rotate_backward{"megashard::norm_and_rotate_backward"};
  DispatchedOperator<Tensor(const Tensor& gate, const Tensor& up)> swiglu{"megashard::swiglu"};
  DispatchedOperator<TwoTensors(const Tensor& grad_y, const Tensor& gate, const Tensor& up)> swiglu_backward{
      "megashard::swiglu_backward"};
  /// The same; overwrites grad_y by swiglu(gate, up).
  DispatchedOperator<TwoTensors(Tensor& grad_y, const Tensor& gate, const Tensor& up)> swiglu_backward_{
      "megashard::swiglu_backward_"};
  /// The loss of each row, fp32; what its gradient needs to know.
  DispatchedOperator<TwoTensors(const Tensor& logits, const Tensor& labels)> cross_entropy{"megashard::cross_entropy"};
  /// Overwrites logits by their gradient.
  DispatchedOperator<void(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss)>
      cross_entropy_backward_{"megashard::cross_entropy_backward_"};
  /// attention_kernels.h's, of dense last dimensions: the weighted values; the log-sum-exp [B, H, T], fp32.
  DispatchedOperator<TwoTensors(const Tensor& q, const Tensor& k, const Tensor& v,
                                const std::optional<Tensor>& key_begins, int64_t window, double scale)>
      attention{"megashard::attention"};
  DispatchedOperator<ThreeTensors(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& out, const Tensor& lse, const std::optional<Tensor>& key_begins,
                                  int64_t window, double scale)>
      attention_backward{"megashard::attention_backward"};
};

/// Looked up once.
const FusedOperators& fused_operators();

/// Whether the backend of x has the operator for its dtype.
template <class Operator>
bool has_kernel(const Operator& fused, const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && fused.runs_on(x);
}

}  // namespace megashard
