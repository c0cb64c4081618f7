// Operators that allocate, copy and rebind memory.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <cstring>
#include <string>

#include "parallel/sim/device_allocator.h"
#include "parallel/sim/operation.h"
#include "parallel/sim/pinned_memory.h"
#include "parallel/sim/settings.h"
#include "parallel/sim/tensor_memory.h"

namespace megashard::sim {
namespace {

/// Scope in which `device` is the calling thread's current device.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : former_(current_device()) {
    if (device && device->has_index()) set_current_device(device->index());
  }
  ~OnDevice() { set_current_device(former_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int former_;
};

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice scope(device);
  return at::detail::empty_generic(sizes, &DeviceAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice scope(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

/// Copies the host's current bytes: pageable memory is read at the call.
at::Tensor as_of_now(const at::Tensor& source) {
  return source.is_cpu() && !PinnedMemory::get().holds(source.const_data_ptr()) ? source.clone() : source;
}

/// The host reads zeros. Offloaded rows are never read: a plan leaves their memory untouched.
void copy_of_shapes(Operation& operation, const at::Tensor& self, const at::Tensor& source, bool waits) {
  constexpr size_t kMostRead = 1 << 20;
  if (self.is_cpu() && self.nbytes() <= kMostRead) self.detach().zero_();
  const auto& on_host = self.is_cpu() ? self : source;
  if (on_host.is_cpu()) operation.computes(static_cast<double>(on_host.nbytes()) / settings().model.host_bandwidth);
  operation.end();
  if (waits) operation.device().timeline.host_waits(operation.device().timeline.over(agent_of(operation.stream())));
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const c10::Device where = self.is_cuda() ? self.device() : source.device();
  const bool from_host = source.is_cpu(), to_host = self.is_cpu();
  const at::Tensor& on_host = from_host ? source : self;
  const bool pinned = (from_host || to_host) && PinnedMemory::get().holds(on_host.const_data_ptr());
  const bool waits = (from_host || to_host) && !(non_blocking && pinned);
  Operation operation(SimDevice::of(where), from_host ? "copy to the device"
                                            : to_host ? "copy to the host"
                                                      : "aten::copy_");
  operation.reads(source);
  operation.writes(self);
  if (settings().shapes) {
    copy_of_shapes(operation, self, source, waits);
    return self;
  }
  const auto host_view = [](const at::Tensor& tensor) {
    const bool known = tensor.is_cuda() || PinnedMemory::get().holds(tensor.storage().data());
    return known ? host_alias(tensor) : tensor;
  };
  const bool keeps = operation.device().recording.on() && !to_host;
  const at::Tensor from = host_view(keeps ? as_of_now(source) : source), to = host_view(self.detach());
  to.copy_(from.expand_as(to));
  if (!waits || !to_host) operation.recorded([from, to] { to.copy_(from.expand_as(to)); });
  if (waits) {
    operation.device().host_waits_for_stream(operation.stream(),
                                             !non_blocking ? "a blocking copy" : "a copy of memory that is not pinned");
  }
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const int64_t numel = c10::multiply_integers(sizes);
  const size_t bytes = static_cast<size_t>(numel + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    const c10::Storage grown = new_device_storage(bytes, self.device());
    auto* storage = self.storage().unsafeGetStorageImpl();
    const size_t kept = storage->nbytes();
    if (kept > 0) DeviceAllocator::get().copy_data(grown.mutable_data(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(grown.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto plain = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(plain);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(plain, C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_contiguous({numel});
  impl->set_storage_offset(0);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl == source.unsafeGetTensorImpl()) return self;
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) { return set_whole_storage(self, new_device_storage(0, self.device())); }

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceAllocator::get().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace
}  // namespace megashard::sim

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &megashard::sim::empty);
  m.impl("empty_strided", &megashard::sim::empty_strided);
  m.impl("copy_", &megashard::sim::copy);
  m.impl("resize_", &megashard::sim::resize);
  m.impl("set_", &megashard::sim::set_nothing);
  m.impl("set_.source_Tensor", &megashard::sim::set_tensor);
  m.impl("set_.source_Storage", &megashard::sim::set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &megashard::sim::set_storage);
  m.impl("record_stream", &megashard::sim::record_stream);
}
