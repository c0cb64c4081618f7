#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace megashard {

/// Memory that costs all ranks a call together (windows over it), and so is made once and kept: a tensor whose memory
/// comes back is handed out again for as many bytes on the same stream, whose order keeps the two apart. Ranks that ask
/// for the same sizes on the same streams, and let go of them in the same order, make new memory at the same time,
/// whatever the device's allocator does. Thread safe; tensors may outlive it.
class KeptBuffers {
 public:
  KeptBuffers();

  /// `make`: so many new bytes, a 1-D uint8 tensor.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const c10::Stream& stream,
                  const std::function<at::Tensor(int64_t bytes)>& make);

 private:
  struct Free;
  std::shared_ptr<Free> free_;
};

}  // namespace megashard
