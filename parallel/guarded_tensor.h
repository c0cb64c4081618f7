#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>

namespace megashard {

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
