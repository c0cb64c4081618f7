#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace megashard {

/// Values by TensorImpl. A separate table, because set_data drops anything else that a TensorImpl could carry. Entries
/// of dead tensors are purged eventually. Thread safe.
template <class Value>
class TensorTable {
 public:
  void set(const at::Tensor& tensor, Value value) {
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= purge_at_) purge();
    entries_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                              Entry{WeakTensor(tensor.getIntrusivePtr()), std::move(value)});
  }
  void erase(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    entries_.erase(tensor.unsafeGetTensorImpl());
  }
  std::optional<Value> find(const at::Tensor& tensor) const {
    if (!tensor.defined()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(tensor.unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    return found->second.value;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;  // keeps a dead tensor's address from being reused
    Value value;
  };
  void purge() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
    purge_at_ = 2 * entries_.size() + 64;
  }

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  size_t purge_at_ = 64;
};

}  // namespace megashard
