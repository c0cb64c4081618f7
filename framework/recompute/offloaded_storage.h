#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/device/streams.h"

namespace megashard::detail {

/// Streams of a device's offload; none on a CPU, where copies are synchronous.
struct OffloadStreams {
  explicit OffloadStreams(c10::Device device);

  c10::Device device;
  std::optional<c10::Stream> out;   // device to host
  std::optional<c10::Stream> back;  // host to device
  bool enabled() const { return out.has_value(); }
  c10::Stream current() const;
};

struct OffloadCounts {
  std::atomic<int64_t> out_bytes = 0;
  std::atomic<int64_t> back_bytes = 0;
  std::atomic<int64_t> host_bytes = 0;
};

/// Geometry of a saved tensor over its storage.
struct TensorGeometry {
  explicit TensorGeometry(const at::Tensor& tensor);
  at::Tensor over(const c10::Storage& storage) const;

  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
};

/// Throws, as autograd does without hooks, if a saved tensor's version has changed.
void check_unchanged(c10::IntArrayRef sizes, int64_t saved_version, int64_t version);

/// A storage at the time when autograd saved a tensor over it, in host memory and, while needed, on the device. Not
/// thread-safe.
class OffloadedStorage {
 public:
  /// Starts the copy to the host.
  OffloadedStorage(const at::Tensor& saved, OffloadStreams& streams, OffloadCounts& counts);
  ~OffloadedStorage();
  OffloadedStorage(const OffloadedStorage&) = delete;
  OffloadedStorage& operator=(const OffloadedStorage&) = delete;

  void add_reader() { ++readers_; }  ///< counts one more saved tensor
  /// Frees the device memory. Later work on the current stream runs after the copy.
  void let_go();
  /// Starts the copy to the device, unless the tensor is still there.
  void fetch();
  /// Returns a saved tensor for the current stream. The last reader's call drops the device copy. Throws if the tensor
  /// was changed in place while it was on the device, since the copy may not have finished.
  at::Tensor take(const TensorGeometry& geometry);

 private:
  void drop_device_copy();

  OffloadStreams& streams_;
  OffloadCounts& counts_;
  at::Tensor source_;  // until let_go()
  const int64_t version_;
  int64_t left_at_version_;  // at let_go()
  at::Tensor host_;          // uint8 [bytes]
  StreamEvent copied_;
  at::Tensor device_;  // uint8 [bytes], from fetch() to the last take()
  StreamEvent fetched_;
  int64_t readers_ = 0;
  int64_t taken_ = 0;
};

}  // namespace megashard::detail
