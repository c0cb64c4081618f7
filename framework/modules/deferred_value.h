#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <variant>
#include <vector>

namespace megashard::detail {

using StorageKey = const c10::StorageImpl*;  // a meta storage kept alive by the tape

/// A tensor argument or result of a recorded operation: geometry over a meta storage, or a real tensor.
struct TapeTensor {
  c10::Storage storage;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  bool conjugate = false;
  bool negative = false;
  at::Tensor real;  // if set, a constant with its own data
  uint32_t real_version = 0;

  bool is_meta() const { return static_cast<bool>(storage); }
  StorageKey key() const { return storage.unsafeGetStorageImpl(); }
  bool covers_storage() const;  ///< every byte belongs to exactly one element

  static TapeTensor of(const at::Tensor& tensor, const char* op_name);
};

struct TapeTensors {
  std::vector<TapeTensor> items;
  bool optional = false;  // List[Optional[Tensor]], as for index()
};

using TapeValue = std::variant<c10::IValue, TapeTensor, TapeTensors>;

/// Converts an argument or result for the tape; `op_name` is used in messages.
TapeValue describe(const c10::IValue& value, const std::string& op_name);

void for_each_meta(const TapeValue& value, const std::function<void(const TapeTensor&)>& visit);

/// Properties of operators that the tape needs and their schemas lack.

/// True for in-place operators that overwrite all of self.
bool fills_self(const c10::OperatorHandle& op);
bool only_allocates(const c10::OperatorHandle& op);
/// True for torch::tensor({...}), which allocates with autograd excluded and then writes the bytes itself: its result
/// is a real constant. Call it during the operator's call.
bool is_literal(const c10::OperatorHandle& op);
/// True for operators that are in-place by schema but do not change data.
bool changes_autograd_only(const c10::OperatorHandle& op);

/// Calls `visit` with each defined tensor in an argument or result.
void visit_ivalue_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);
bool is_tensor_list(const c10::IValue& value);
/// Replaces real tensors by meta tensors of the same geometry, for meta kernels that receive both.
c10::IValue meta_twin(const c10::IValue& value);

}  // namespace megashard::detail
