#include "framework/modules/deferred_value.h"

#include <ATen/EmptyTensor.h>

#include "framework/modules/deferred_operators.h"

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

}  // namespace megashard::detail
