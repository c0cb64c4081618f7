#include "framework/recompute/offloaded_storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "parallel/device/buffer_pool.h"
#include "parallel/device/storage.h"

namespace megashard::detail {
namespace {

at::Tensor tensor_over(const c10::Storage& storage, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                       at::IntArrayRef strides, int64_t offset) {
  const auto key = storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor host_buffer(int64_t bytes, bool for_device) {
  if (!for_device) return pooled_empty(bytes, at::kByte, c10::kCPU);
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

}  // namespace

OffloadStreams::OffloadStreams(c10::Device target) : device(target) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  out = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  back = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

c10::Stream OffloadStreams::current() const { return current_stream(device); }

TensorGeometry::TensorGeometry(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      dtype(tensor.dtype()) {}

at::Tensor TensorGeometry::over(const c10::Storage& storage) const {
  return tensor_over(storage, dtype, sizes, strides, offset);
}

void check_unchanged(c10::IntArrayRef sizes, int64_t saved_version, int64_t version) {
  TORCH_CHECK(version == saved_version, "a tensor of sizes ", sizes,
              " that backward needs was changed in place after forward had used it: it is at version ", version,
              " and was saved at version ", saved_version);
}

OffloadedStorage::OffloadedStorage(const at::Tensor& saved, OffloadStreams& streams, OffloadCounts& counts)
    : streams_(streams),
      counts_(counts),
      source_(saved.detach()),
      version_(saved._version()),
      left_at_version_(version_) {
  const at::Tensor bytes = bytes_of(source_.storage());
  host_ = host_buffer(bytes.numel(), streams_.enabled());
  if (streams_.enabled()) order_streams(streams_.current(), *streams_.out);
  {
    const StreamScope scope(streams_.out);
    host_.copy_(bytes, /*non_blocking=*/true);
  }
  if (streams_.enabled()) copied_ = StreamEvent::record(*streams_.out);
  counts_.out_bytes += host_.numel();
  counts_.host_bytes += host_.numel();
}

OffloadedStorage::~OffloadedStorage() {
  let_go();
  drop_device_copy();
  counts_.host_bytes -= host_.numel();
}

void OffloadedStorage::let_go() {
  if (!source_.defined()) return;
  if (streams_.enabled()) copied_.make_wait(streams_.current());
  left_at_version_ = source_._version();
  source_.reset();
}

void OffloadedStorage::fetch() {
  if (device_.defined() || source_.defined()) return;
  device_ = at::empty({host_.numel()}, at::TensorOptions().dtype(at::kByte).device(streams_.device));
  // Work queued on the current stream may still use this memory. The copy to the host ended before let_go().
  if (streams_.enabled()) order_streams(streams_.current(), *streams_.back);
  {
    const StreamScope scope(streams_.back);
    device_.copy_(host_, /*non_blocking=*/true);
  }
  if (streams_.enabled()) fetched_ = StreamEvent::record(*streams_.back);
  counts_.back_bytes += host_.numel();
}

at::Tensor OffloadedStorage::take(const TensorGeometry& geometry) {
  check_unchanged(geometry.sizes, version_, source_.defined() ? source_._version() : left_at_version_);
  fetch();
  const bool last = ++taken_ == readers_;
  if (last) taken_ = 0;  // a retained graph starts over
  if (!device_.defined()) return geometry.over(source_.storage());
  if (streams_.enabled()) fetched_.make_wait(streams_.current());
  auto tensor = geometry.over(device_.storage());
  if (last) device_.reset();
  return tensor;
}

void OffloadedStorage::drop_device_copy() {
  if (!device_.defined()) return;
  if (streams_.enabled()) fetched_.make_wait(streams_.current());  // fetched for nothing
  device_.reset();
}

}  // namespace megashard::detail
