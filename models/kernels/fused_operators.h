#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

/// The fused functions and their gradients as operators of LibTorch's dispatcher, where a backend
/// has kernels for them or not. The CPU has; the names and what each operator writes are in the
/// schemas of fused_operators.cpp, and a module may register another backend's kernels for them.
namespace megashard {

template <class Signature>
class FusedOperator;

template <class Result, class... Arguments>
class FusedOperator<Result(Arguments...)> {
 public:
  explicit FusedOperator(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Arguments...)>()) {}

  /// Whether x's backend runs it; a backend that does runs its gradient, too.
  bool runs_on(const at::Tensor& x) const {
    return handle_.hasComputedKernelForDispatchKey(
        c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, x.key_set().highestBackendKey()));
  }
  Result operator()(Arguments... arguments) const { return handle_.call(std::forward<Arguments>(arguments)...); }

 private:
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

/// Tensors are contiguous but for rotate's x, whose last dimension is dense.
struct FusedOperators {
  using Tensor = at::Tensor;
  using TwoTensors = std::tuple<Tensor, Tensor>;

  FusedOperator<Tensor(const Tensor& x, const Tensor& weight)> linear_by_fp32{"megashard::linear_by_fp32"};
  /// y; 1 / rms of each row, fp32.
  FusedOperator<TwoTensors(const Tensor& x, const Tensor& weight, double eps)> rms_norm{"megashard::rms_norm"};
  /// Of x; of the weight, fp32, undefined unless asked for.
  FusedOperator<TwoTensors(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse_rms,
                           bool of_weight)>
      rms_norm_backward{"megashard::rms_norm_backward"};
  /// `back` turns by the opposite angle.
  FusedOperator<Tensor(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back)> rotate{"megashard::rotate"};
  FusedOperator<Tensor(const Tensor& gate, const Tensor& up)> swiglu{"megashard::swiglu"};
  FusedOperator<TwoTensors(const Tensor& grad_y, const Tensor& gate, const Tensor& up)> swiglu_backward{
      "megashard::swiglu_backward"};
  /// The loss of each row, fp32; what its gradient needs to know.
  FusedOperator<TwoTensors(const Tensor& logits, const Tensor& labels)> cross_entropy{"megashard::cross_entropy"};
  /// Overwrites logits by their gradient.
  FusedOperator<void(Tensor& logits, const Tensor& labels, const Tensor& stats, const Tensor& grad_loss)>
      cross_entropy_backward_{"megashard::cross_entropy_backward_"};
};

/// Looked up once.
const FusedOperators& fused_operators();

}  // namespace megashard
