#include "parallel/backward_scope.h"

#include <utility>

namespace megashard {
namespace {

thread_local RecomputeScope* innermost_recompute = nullptr;  // a recompute stays on one thread

}  // namespace

RecomputeScope::RecomputeScope() : outer_(std::exchange(innermost_recompute, this)) {}

RecomputeScope::~RecomputeScope() { innermost_recompute = outer_; }

RecomputeScope* RecomputeScope::current() { return innermost_recompute; }

void RecomputeScope::run_callbacks() {
  for (auto& callback : std::exchange(callbacks_, {})) callback();
}

}  // namespace megashard
