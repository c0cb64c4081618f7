#pragma once

#include <c10/core/GradMode.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace megashard {

/// Scope of a reentrant recompute's first forward, which runs without grad. Backward runs it again with grad, so units
/// keep parameters and record prefetch order as they do with grad.
class ForwardToRepeat {
 public:
  ForwardToRepeat();
  ~ForwardToRepeat();
  ForwardToRepeat(const ForwardToRepeat&) = delete;
  ForwardToRepeat& operator=(const ForwardToRepeat&) = delete;

  static bool running();   ///< on this thread
  static int64_t count();  ///< number of scopes that this thread has begun

 private:
  bool outer_;
};

/// True if a backward may follow through what this thread computes.
inline bool backward_may_follow() { return c10::GradMode::is_enabled() || ForwardToRepeat::running(); }

/// Scope of a recompute's forward in backward, on this thread. Tells units in it that this is not their first forward,
/// that an exception may be recompute's early stop, and that a reentrant recompute runs a backward inside the current
/// one, to which Engine::queue_callback would bind.
class RecomputeScope {
 public:
  RecomputeScope();
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  /// Innermost scope of this thread; null outside recomputes.
  static RecomputeScope* current();

  /// Runs `callback` on this thread after the recomputed forward, before the inner backward of a reentrant recompute,
  /// so that callbacks it queues on the engine belong to the outer backward. A non-reentrant recompute has no inner
  /// backward and drops it.
  void before_inner_backward(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  void run_callbacks();  ///< called by the recompute that owns the scope

 private:
  RecomputeScope* outer_;
  std::vector<std::function<void()>> callbacks_;
};

/// True if a backward may follow and this is not a recompute: the forward that counts a step's tokens once.
inline bool is_first_forward() { return backward_may_follow() && RecomputeScope::current() == nullptr; }

}  // namespace megashard
