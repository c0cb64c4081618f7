#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

namespace megashard::sim {

/// Calls `each` for the contiguous runs of a tensor's elements; for the whole extent if there are more than a few
/// thousand runs.
void over_runs(const at::Tensor& tensor, const std::function<void(const void* begin, size_t bytes)>& each);

/// Name of the memory's owner ("parameter 'layers.0.up.weight'"), interned; null if unknown.
const std::string* name_of_memory(const at::Tensor& tensor);

/// A CPU tensor over the same memory.
at::Tensor host_alias(const at::Tensor& tensor);

/// A device tensor over `storage` with the sizes and strides of `like`.
at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like);

/// Allocates device memory from the current stream's pool.
c10::Storage new_device_storage(size_t bytes, c10::Device device);

}  // namespace megashard::sim
