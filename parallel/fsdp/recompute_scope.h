#pragma once

#include <c10/core/GradMode.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace megashard {

/// Lives while a reentrant recompute runs a forward without grad for the first time. Backward will
/// run it again with grad, so units keep, and remember for prefetching, what they would with grad.
class ForwardToRepeat {
 public:
  ForwardToRepeat();
  ~ForwardToRepeat();
  ForwardToRepeat(const ForwardToRepeat&) = delete;
  ForwardToRepeat& operator=(const ForwardToRepeat&) = delete;

  static bool running();   ///< on this thread
  static int64_t count();  ///< how many this thread has begun

 private:
  bool outer_;
};

/// Whether a backward through what this thread computes may follow.
inline bool backward_may_follow() { return c10::GradMode::is_enabled() || ForwardToRepeat::running(); }

/// Lives while a recompute in backward runs a forward again on this thread. Units that are called
/// in it may look: their forward is not the first one, an exception through it may only be
/// recompute's early stop, and a reentrant recompute goes on to run a backward inside the one that
/// is running, to which Engine::queue_callback would bind.
class RecomputeScope {
 public:
  RecomputeScope();
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  /// The innermost one on this thread; null outside recomputes.
  static RecomputeScope* current();

  /// `callback` runs on this thread once the forward has been run again, before the inner backward
  /// of a reentrant recompute starts: what it queues on the engine belongs to the outer backward.
  /// Non-reentrant ones have no inner backward and drop it.
  void before_inner_backward(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  void run_callbacks();  ///< for the recompute that owns the scope

 private:
  RecomputeScope* outer_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace megashard
