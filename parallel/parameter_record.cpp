#include "parallel/parameter_record.h"

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

}  // namespace megashard
