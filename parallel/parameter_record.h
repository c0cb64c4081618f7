#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "parallel/sharded_tensor.h"

namespace megashard {

class FsdpParam;

/// What is known of a parameter beside its tensor.
struct ParameterRecord {
  /// A mesh dimension beside FSDP's (tensor_parallel_layout.h).
  struct Layout {
    std::weak_ptr<ProcessGroup> group;
    std::string dim_name;
    Placement placement;
  };
  /// Index of a weight in a keep_adjacent list (adjacent_parameters.h).
  struct Adjacent {
    int64_t set = 0;  ///< unique number of the list
    size_t index = 0;
    size_t count = 0;
  };

  std::vector<Layout> layouts{};
  std::optional<Adjacent> adjacent{};
  FsdpParam* sharded = nullptr;  ///< under fully_shard
};

/// The records of all parameters, by TensorImpl: set_data drops anything else that a TensorImpl could carry. Records of
/// dead tensors are purged eventually. Thread safe.
class ParameterRecords {
 public:
  static ParameterRecords& all();

  /// read(const ParameterRecord&) -> its result; an empty record if there is none. `read` must not call others here.
  template <class Read>
  auto read(const at::Tensor& parameter, const Read& read) const {
    static const ParameterRecord empty;
    const std::lock_guard lock(mutex_);
    const auto found = parameter.defined() ? entries_.find(parameter.unsafeGetTensorImpl()) : entries_.end();
    return read(found == entries_.end() ? empty : found->second.record);
  }
  /// change(ParameterRecord&), of a new record if there is none.
  template <class Change>
  void change(const at::Tensor& parameter, const Change& change) {
    const std::lock_guard lock(mutex_);
    change(record_of(parameter));
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;  // keeps a dead tensor's address from being reused
    ParameterRecord record;
  };
  ParameterRecord& record_of(const at::Tensor& parameter);

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  size_t purge_at_ = 64;
};

}  // namespace megashard
