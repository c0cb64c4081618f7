#include "parallel/fsdp/recompute_scope.h"

#include <utility>

namespace megashard {
namespace {

thread_local RecomputeScope* innermost_recompute = nullptr;  // a recompute stays on one thread
thread_local bool forward_to_repeat = false;
thread_local int64_t forwards_to_repeat = 0;

}  // namespace

ForwardToRepeat::ForwardToRepeat() : outer_(std::exchange(forward_to_repeat, true)) { ++forwards_to_repeat; }

ForwardToRepeat::~ForwardToRepeat() { forward_to_repeat = outer_; }

bool ForwardToRepeat::running() { return forward_to_repeat; }

int64_t ForwardToRepeat::count() { return forwards_to_repeat; }

RecomputeScope::RecomputeScope() : outer_(std::exchange(innermost_recompute, this)) {}

RecomputeScope::~RecomputeScope() { innermost_recompute = outer_; }

RecomputeScope* RecomputeScope::current() { return innermost_recompute; }

void RecomputeScope::run_callbacks() {
  for (auto& callback : std::exchange(callbacks_, {})) callback();
}

}  // namespace megashard
