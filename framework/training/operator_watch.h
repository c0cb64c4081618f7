#pragma once

#include <ATen/record_function.h>

#include <functional>

namespace megashard {

/// Calls `after` behind each operator of the thread that makes it, and of autograd's, which works for that one while it
/// waits: not of threads that load data. One in a process; who makes it destroys it.
class OperatorWatch {
 public:
  explicit OperatorWatch(std::function<void()> after);
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  at::CallbackHandle handle_;
};

}  // namespace megashard
