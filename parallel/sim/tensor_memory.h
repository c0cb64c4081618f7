#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace megashard::sim {

/// Calls `each` with the contiguous parts of the memory that the tensor's elements take; with the
/// whole extent where there would be more than a few thousand.
void over_runs(const at::Tensor& tensor, const std::function<void(const void* begin, size_t bytes)>& each);

/// What is known of whose memory this is ("parameter 'layers.0.up.weight'"), interned; null:
/// nothing.
const std::string* name_of_memory(const at::Tensor& tensor);

/// A tensor of the CPU over the same memory.
at::Tensor host_alias(const at::Tensor& tensor);

/// A tensor of the device over `storage`, with the sizes and strides of `like`.
at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like);

/// New memory of the device from the pools of the current stream.
c10::Storage new_device_storage(size_t bytes, c10::Device device);

}  // namespace megashard::sim
