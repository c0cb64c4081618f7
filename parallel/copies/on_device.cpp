#include "parallel/copies/on_device.h"

namespace megashard {

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  const bool pageable = tensor.is_cpu() && !device.is_cpu() && !tensor.is_pinned();
  return (pageable ? tensor.contiguous().pin_memory() : tensor).to(device, /*non_blocking=*/true);
}

}  // namespace megashard
