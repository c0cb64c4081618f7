#include "parallel/guard_key.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <string_view>

namespace megashard {
namespace {

// A key that LibTorch keeps for tests: above autograd, and without kernels of its own.
constexpr auto kGuardKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local int forward_depth = 0;

void refuse_parameter(const GuardInfo& info, const std::string& operator_name) {
  TORCH_CHECK(false, "parameter '", info.name, "' is sharded here (", info.layout, "): ", operator_name,
              " was called outside its fully_shard unit. Use it inside the unit's forward, and call the unit through "
              "Hooked<M>::forward or operator() of the model");
}

void check_gradient(const GuardInfo& info, const std::string& operator_name) {
  constexpr std::array<std::string_view, 7> kWholeTensor = {
      "aten::norm", "aten::linalg_vector_norm", "aten::_foreach_norm", "aten::dot", "aten::vdot",
      "aten::cat",  "aten::frobenius_norm"};
  for (const auto& name : kWholeTensor) {
    TORCH_CHECK(operator_name != name, "the gradient of parameter '", info.name, "' is sharded (", info.layout, "): ",
                operator_name, " would see this rank's part only. Use megashard::clip_grad_norm_ or total_grad_norm; "
                "optimizers that flatten all gradients (LBFGS) cannot be used");
  }
}

void check(const at::Tensor& tensor, const c10::OperatorHandle& op) {
  if (!tensor.defined() || !tensor.key_set().has(kGuardKey)) return;
  const auto* info =
      dynamic_cast<const GuardInfo*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  if (info == nullptr) return;
  if (info->kind == GuardInfo::Kind::kGradient) return check_gradient(*info, op.schema().name());
  if (forward_depth > 0 || (c10::GradMode::is_enabled() && tensor.requires_grad())) {
    refuse_parameter(*info, op.schema().name());
  }
}

void guard_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto detach = c10::OperatorName("aten::detach", "");
  if (op.operator_name() != detach) {
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        check(value.toTensor(), op);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) check(tensor, op);
      }
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kGuardKey);
  op.callBoxed(stack);
}

at::Tensor over_storage(const at::Tensor& tensor, c10::DispatchKeySet keys) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys,
                                                         tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&guard_fallback>());
}

at::Tensor guarded(const at::Tensor& local, c10::intrusive_ptr<GuardInfo> info) {
  auto result = over_storage(local, local.key_set().add(kGuardKey));
  result.unsafeGetTensorImpl()->set_backend_meta(std::move(info));
  return result;
}

at::Tensor unguarded(const at::Tensor& tensor) {
  return over_storage(tensor, tensor.key_set().remove(kGuardKey));
}

bool is_guarded(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kGuardKey);
}

void enter_guarded_forward() { ++forward_depth; }
void leave_guarded_forward() { --forward_depth; }

}  // namespace megashard
