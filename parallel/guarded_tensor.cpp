#include "parallel/guarded_tensor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_map>

namespace megashard {

ParameterRecords& ParameterRecords::all() {
  static auto* records = new ParameterRecords;  // leaked: models may outlive static destruction
  return *records;
}

ParameterRecord& ParameterRecords::record_of(const at::Tensor& parameter) {
  const auto* key = parameter.unsafeGetTensorImpl();
  const auto found = entries_.find(key);
  if (found != entries_.end()) return found->second.record;
  if (entries_.size() >= purge_at_) {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
    purge_at_ = 2 * entries_.size() + 64;
  }
  return entries_.emplace(key, Entry{WeakTensor(parameter.getIntrusivePtr()), {}}).first->second.record;
}

namespace {

// A dispatch key that LibTorch keeps for tests: above autograd, without kernels of its own.
constexpr auto kGuardKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local int forward_depth = 0;

[[noreturn]] void refuse_parameter(const GuardInfo& info, const std::string& operator_name) {
  TORCH_CHECK(false, "parameter '", info.name, "' is sharded here (", info.layout, "): ", operator_name,
              " was called outside its fully_shard unit. Use it inside the unit's forward, and call the unit through "
              "Hooked<M>::forward or operator() of the model");
}

[[noreturn]] void refuse_gradient(const GuardInfo& info, const std::string& operator_name) {
  TORCH_CHECK(false, "the gradient of parameter '", info.name, "' is sharded (", info.layout, "): ", operator_name,
              " would see this rank's part only. Use megashard::clip_grad_norm_ or total_grad_norm; optimizers that "
              "flatten all gradients (LBFGS) cannot be used");
}

/// How an operator uses its tensors, as far as local rows matter.
enum class Use {
  kRows,     // elementwise or unknown: correct on local rows
  kHandle,   // does not read the data
  kLike,     // creates a tensor of the same sizes: optimizer state
  kMixing,   // mixes rows
  kLayer,    // a layer's use of its weight
  kFlatten,  // LBFGS flattens all gradients into one vector
};

Use use_of(const std::string& operator_name) {
  static const std::unordered_map<std::string_view, Use> uses = [] {
    std::unordered_map<std::string_view, Use> map;
    auto add = [&map](Use use, std::initializer_list<std::string_view> names) {
      for (const auto name : names) map.emplace(name, use);
    };
    add(Use::kHandle,
        {"aten::detach", "aten::requires_grad_", "aten::set_data", "aten::_has_compatible_shallow_copy_type"});
    add(Use::kLike, {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
                     "aten::randn_like"});
    add(Use::kMixing,
        {"aten::norm", "aten::linalg_vector_norm", "aten::frobenius_norm", "aten::_foreach_norm", "aten::dot",
         "aten::vdot", "aten::cat", "aten::sum", "aten::mean", "aten::max", "aten::min", "aten::amax"});
    add(Use::kLayer,
        {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::einsum", "aten::embedding",
         "aten::embedding_bag", "aten::layer_norm", "aten::rms_norm", "aten::batch_norm", "aten::group_norm",
         "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution", "aten::bilinear", "aten::prelu"});
    add(Use::kFlatten, {"aten::view", "aten::reshape", "aten::flatten"});
    return map;
  }();
  const auto found = uses.find(operator_name);
  return found == uses.end() ? Use::kRows : found->second;
}

const GuardInfo* info_of(const at::Tensor& tensor) {
  if (!is_guarded(tensor)) return nullptr;
  return dynamic_cast<const GuardInfo*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

void check(const at::Tensor& tensor, Use use, const c10::OperatorHandle& op) {
  const auto* info = info_of(tensor);
  if (info == nullptr) return;
  const std::string& name = op.schema().name();
  if (info->kind == GuardInfo::Kind::kGradient) {
    if (use == Use::kMixing || use == Use::kFlatten) refuse_gradient(*info, name);
    return;
  }
  const bool recorded = c10::GradMode::is_enabled() && tensor.requires_grad() && use != Use::kLike;
  if (use == Use::kMixing || use == Use::kLayer || forward_depth > 0 || recorded) refuse_parameter(*info, name);
}

void guard_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Use use = use_of(op.operator_name().name);
  if (use != Use::kHandle) {
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        check(value.toTensor(), use, op);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) check(tensor, use, op);
      }
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kGuardKey);
  op.callBoxed(stack);
}

at::Tensor over_storage(const at::Tensor& tensor, c10::DispatchKeySet keys) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
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

at::Tensor unguarded(const at::Tensor& tensor) { return over_storage(tensor, tensor.key_set().remove(kGuardKey)); }

bool is_guarded(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kGuardKey); }

std::string guarded_name(const at::Tensor& tensor) {
  const auto* info = info_of(tensor);
  return info == nullptr ? "" : info->name;
}

UnguardedScope::UnguardedScope() : below_(kGuardKey) {}

void enter_guarded_forward() { ++forward_depth; }
void leave_guarded_forward() { --forward_depth; }

}  // namespace megashard
