#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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

/// Properties of a parameter that its tensor does not hold.
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

/// Metadata of a guarded tensor, carried by its TensorImpl.
struct GuardInfo : c10::BackendMeta {
  enum class Kind { kParameter, kGradient };
  Kind kind = Kind::kParameter;
  std::string name;    ///< fully qualified once the root has run
  std::string layout;  ///< "local rows [4, 6] of [8, 6]"
};

/// Returns a tensor over the same storage whose use is checked, so that local rows are not mistaken for the whole
/// parameter. Operators on a guarded parameter throw and name it if autograd records (the parameter requires grad) or
/// while a unit's forward runs. Layer operators and norms of a guarded parameter, and norms and flattening of a guarded
/// gradient, always throw. All other operators pass, so that optimizers work.
at::Tensor guarded(const at::Tensor& local, c10::intrusive_ptr<GuardInfo> info);
/// Returns the same storage without the guard, for collectives and internal arithmetic.
at::Tensor unguarded(const at::Tensor& tensor);
bool is_guarded(const at::Tensor& tensor);
/// Name of a guarded tensor; empty for others.
std::string guarded_name(const at::Tensor& tensor);

/// Scope in which this thread's operators accept guarded tensors, for internal arithmetic over many of them.
class UnguardedScope {
 public:
  UnguardedScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
};

/// Begin and end of a unit's forward on this thread; calls nest.
void enter_guarded_forward();
void leave_guarded_forward();

}  // namespace megashard
