#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace megashard {

/// The tensor on the device, which the host does not wait for: what is in ordinary host memory goes
/// by way of pinned memory. Itself where it is there already.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device);

}  // namespace megashard
