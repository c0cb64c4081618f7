#include "framework/training/operator_watch.h"

#include <c10/util/Exception.h>

#include <utility>

namespace megashard {
namespace {

// A callback of LibTorch's is a plain function.
std::function<void()> after_operator;

}  // namespace

OperatorWatch::OperatorWatch(std::function<void()> after) {
  TORCH_INTERNAL_ASSERT(after_operator == nullptr);
  after_operator = std::move(after);
  const auto nothing = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; };
  const auto behind = [](const at::RecordFunction&, at::ObserverContext*) { after_operator(); };
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(nothing, behind).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
  after_operator = nullptr;
}

}  // namespace megashard
