#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace megashard {

/// Copies a tensor to the device without blocking the host; pageable host memory goes through pinned memory. Returns
/// the tensor itself if it is there already.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device);

}  // namespace megashard
