#include "framework/modules/deferred_value.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string_view>

namespace megashard::detail {
namespace {

constexpr size_t kLargestConstantCopied = size_t{1} << 20;  // bytes; larger real inputs are checked for changes

}  // namespace

bool TapeTensor::covers_storage() const {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return offset == 0 && static_cast<size_t>(numel) * dtype.itemsize() == key()->nbytes() &&
         at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize()) == key()->nbytes();
}

TapeTensor TapeTensor::of(const at::Tensor& tensor, const char* op_name) {
  TapeTensor result;
  if (!tensor.defined()) return result;
  TORCH_CHECK(tensor.layout() == c10::kStrided, op_name, " works on a ", tensor.layout(),
              " tensor, which cannot be constructed deferred: build it outside DeferredInit");
  if (!tensor.is_meta()) {
    const bool copied = tensor.nbytes() <= kLargestConstantCopied && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    result.real = copied ? tensor.detach().clone() : tensor.detach();
    result.real_version = result.real._version();
    return result;
  }
  result.storage = tensor.storage();
  result.sizes = tensor.sizes().vec();
  result.strides = tensor.strides().vec();
  result.offset = tensor.storage_offset();
  result.dtype = tensor.dtype();
  result.conjugate = tensor.is_conj();
  result.negative = tensor.is_neg();
  return result;
}

TapeValue describe(const c10::IValue& value, const std::string& op_name) {
  if (value.isTensor()) return TapeTensor::of(value.toTensor(), op_name.c_str());
  if (!is_tensor_list(value)) return value;
  TapeTensors list{.items = {}, .optional = value.isOptionalTensorList()};
  for (const c10::IValue& item : value.toListRef()) {
    list.items.push_back(TapeTensor::of(item.isTensor() ? item.toTensor() : at::Tensor(), op_name.c_str()));
  }
  return list;
}

void for_each_meta(const TapeValue& value, const std::function<void(const TapeTensor&)>& visit) {
  if (const auto* one = std::get_if<TapeTensor>(&value)) {
    if (one->is_meta()) visit(*one);
  } else if (const auto* many = std::get_if<TapeTensors>(&value)) {
    for (const auto& item : many->items) {
      if (item.is_meta()) visit(item);
    }
  }
}

namespace {

bool name_is_one_of(const c10::OperatorHandle& op, std::initializer_list<std::string_view> names) {
  const std::string_view name = op.schema().name();
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// A meta tensor of the same geometry, for meta kernels that receive real and meta tensors.
at::Tensor meta_twin(const at::Tensor& real) {
  if (!real.defined() || real.is_meta() || real.unsafeGetTensorImpl()->is_wrapped_number()) return real;
  return at::Tensor(at::detail::empty_strided_meta(real.sizes(), real.strides(), real.scalar_type()));
}

}  // namespace

bool fills_self(const c10::OperatorHandle& op) {
  return name_is_one_of(
      op, {"aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_", "aten::random_",
           "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"});
}

bool only_allocates(const c10::OperatorHandle& op) {
  return name_is_one_of(op, {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                             "aten::new_empty_strided", "aten::empty_permuted"});
}

bool is_literal(const c10::OperatorHandle& op) {
  return name_is_one_of(op, {"aten::empty", "aten::scalar_tensor"}) && !c10::InferenceMode::is_enabled() &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

bool changes_autograd_only(const c10::OperatorHandle& op) {
  return name_is_one_of(op, {"aten::requires_grad_", "aten::detach_", "aten::retain_grad"});
}

void visit_ivalue_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
    }
  }
}

bool is_tensor_list(const c10::IValue& value) { return value.isTensorList() || value.isOptionalTensorList(); }

c10::IValue meta_twin(const c10::IValue& value) {
  if (value.isTensor()) return meta_twin(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> twins;
    for (const auto& item : value.toTensorVector()) twins.push_back(meta_twin(item));
    return twins;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> twins;
  for (const c10::IValue& item : value.toListRef()) {
    twins.push_back(item.isTensor() ? std::make_optional(meta_twin(item.toTensor())) : std::nullopt);
  }
  return twins;
}

}  // namespace megashard::detail
