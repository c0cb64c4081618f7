#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace megashard {

/// Cache of memory that needs a collective call to create (windows over it). Freed memory is reused for tensors of the
/// same size on the same stream, whose order separates the two uses. Ranks that request the same sizes on the same
/// streams and free them in the same order create new memory at the same time, whatever the device's allocator does.
/// Thread safe; tensors may outlive it.
class KeptBuffers {
 public:
  KeptBuffers();

  /// `make` returns `bytes` new bytes as a 1-D uint8 tensor.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const c10::Stream& stream,
                  const std::function<at::Tensor(int64_t bytes)>& make);

 private:
  struct Free;
  std::shared_ptr<Free> free_;
};

}  // namespace megashard
