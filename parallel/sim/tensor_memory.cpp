#include "parallel/sim/tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel/sim/arena.h"
#include "parallel/sim/device_allocator.h"
#include "parallel/sim/sim_device.h"

namespace megashard::sim {
namespace {

constexpr size_t kMaxRuns = 4096;

const char* first_byte(const at::Tensor& tensor) {
  const auto& memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return static_cast<const char*>(memory.get());
}

}  // namespace

void over_runs(const at::Tensor& tensor, const std::function<void(const void*, size_t)>& each) {
  const char* memory = first_byte(tensor);
  if (memory == nullptr) return;
  const auto element = tensor.element_size();
  const char* begin = memory + static_cast<size_t>(tensor.storage_offset()) * element;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // in elements
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) {
    run = (dims[inner].second - 1) * dims[inner].first + run;
    ++inner;
  }
  size_t runs = 1;
  for (size_t i = inner; i < dims.size(); ++i) runs *= static_cast<size_t>(dims[i].second);
  if (runs > kMaxRuns) {
    for (; inner < dims.size(); ++inner) run += (dims[inner].second - 1) * dims[inner].first;
    runs = 1;
  }
  std::vector<int64_t> index(dims.size(), 0);
  for (size_t i = 0; i < runs; ++i) {
    int64_t offset = 0;
    for (size_t dim = inner; dim < dims.size(); ++dim) offset += index[dim] * dims[dim].first;
    each(begin + static_cast<size_t>(offset) * element, static_cast<size_t>(run) * element);
    for (size_t dim = inner; dim < dims.size() && ++index[dim] == dims[dim].second; ++dim) index[dim] = 0;
  }
}

/// UnshardedStorage's error message names its parameter: the words up to the second quote.
const std::string* name_of_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto& message = storage->get_extra_meta().custom_data_ptr_error_msg_;
  if (!message) return nullptr;
  const auto first = message->find('\''), second = message->find('\'', first + 1);
  return second == message->npos ? nullptr : interned(message->substr(0, second + 1));
}

at::Tensor host_alias(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  char* memory = const_cast<char*>(first_byte(tensor));
  if (memory == nullptr && tensor.numel() > 0) static_cast<void>(impl->mutable_data());  // throws its own error
  if (memory != nullptr) memory = Arena::get().reachable(memory);
  c10::Storage storage(c10::Storage::use_byte_size_t(), impl->nbytes(), c10::DataPtr(memory, c10::Device(c10::kCPU)),
                       c10::GetCPUAllocator(),
                       /*resizable=*/true);
  const c10::InferenceMode inference(tensor.is_inference());
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  auto* made = alias.unsafeGetTensorImpl();
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  if (tensor.is_conj()) made->_set_conj(true);
  if (tensor.is_neg()) made->_set_neg(true);
  return alias;
}

at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like) {
  const c10::InferenceMode inference(like.is_inference());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  return tensor;
}

c10::Storage new_device_storage(size_t bytes, c10::Device device) {
  auto& allocator = DeviceAllocator::get();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator.allocate_on(bytes, device.index()), &allocator,
                      /*resizable=*/true);
}

}  // namespace megashard::sim
