#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>

namespace megashard {

/// What a guarded tensor knows of itself; carried by its TensorImpl.
struct GuardInfo : c10::BackendMeta {
  enum class Kind { kParameter, kGradient };
  Kind kind = Kind::kParameter;
  std::string name;    ///< fully qualified once the root has run
  std::string layout;  ///< "local rows [4, 6] of [8, 6]"
};

/// A tensor over the same storage whose use is watched: local rows must not be mistaken for the
/// whole parameter. Operators on a guarded parameter throw, naming it, when autograd records (the
/// parameter requires grad) or while a unit's forward runs; layers' operators and norms of a
/// guarded parameter, norms and flattening of a guarded gradient always throw. All else passes, so
/// optimizers work.
at::Tensor guarded(const at::Tensor& local, c10::intrusive_ptr<GuardInfo> info);
/// The same storage without the guard, for collectives and our own arithmetic.
at::Tensor unguarded(const at::Tensor& tensor);
bool is_guarded(const at::Tensor& tensor);
/// The name of a guarded tensor; empty for others.
std::string guarded_name(const at::Tensor& tensor);

/// While it lives, this thread's operators take guarded tensors as they are: for our own arithmetic over many.
class UnguardedScope {
 public:
  UnguardedScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
};

/// Between these calls this thread runs a unit's forward; they nest.
void enter_guarded_forward();
void leave_guarded_forward();

}  // namespace megashard
