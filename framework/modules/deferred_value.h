#pragma once

#include <ATen/core/Tensor.h>
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

}  // namespace megashard::detail
