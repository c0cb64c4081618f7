#include "checkpoint/steps/shard_snapshot.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/files/run_in_threads.h"
#include "parallel/device/cuda_module.h"
#include "parallel/device/streams.h"

namespace megashard {
namespace {

constexpr int64_t kShardAlignment = 64;        // a cache line
constexpr int64_t kMinBytesPerCopy = 8 << 20;  // starting a thread takes as long as copying 0.5 MiB

struct Piece {
  char* to;
  const char* from;
  int64_t bytes;
};

/// Copies bytes [begin, end) of the concatenated pieces.
void copy_range(const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  for (const auto& piece : pieces) {
    const auto first = std::max<int64_t>(0, begin);
    const auto last = std::min(piece.bytes, end);
    if (first < last) std::memcpy(piece.to + first, piece.from + first, static_cast<size_t>(last - first));
    begin -= piece.bytes;
    end -= piece.bytes;
  }
}

void copy_pieces(const std::vector<Piece>& pieces) {
  int64_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes;
  const auto parts = std::clamp<int64_t>(total / kMinBytesPerCopy, 1, at::get_num_threads());
  run_in_threads(parts, parts, [&](const NextItem& next) {
    while (const auto part = next()) copy_range(pieces, total * *part / parts, total * (*part + 1) / parts);
  });
}

/// Uses pages of 2 MiB if available: fewer page faults and TLB misses.
at::Tensor huge_pages(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no host memory for a copy of this rank's ", bytes,
              " bytes of shards, which an asynchronous save needs: leave --async-save out");
  ::madvise(memory, size, MADV_HUGEPAGE);
  return at::from_blob(
      memory, {bytes}, [size](void* data) { ::munmap(data, size); }, at::TensorOptions(at::kByte));
}

c10::Device device_of(const ShardedTensors& tensors) {
  for (const auto& [key, tensor] : tensors) {
    if (!tensor.local.device().is_cpu()) return tensor.local.device();
  }
  return c10::kCPU;
}

int64_t place_of(const at::Tensor& shard) {
  const auto bytes = static_cast<int64_t>(shard.numel() * shard.element_size());
  return (bytes + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

}  // namespace

void ShardSnapshot::make_room(int64_t bytes, bool for_device) {
  if (buffer_.defined() && buffer_.numel() >= bytes) return;
  buffer_.reset();  // free it before allocating the new one
  buffer_ = for_device ? load_cuda_module().pinned_bytes(bytes) : huge_pages(bytes);
}

ShardedTensors ShardSnapshot::take(const ShardedTensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto device = device_of(tensors);
  int64_t total = kShardAlignment;
  for (const auto& [key, tensor] : tensors) total += place_of(tensor.local);
  make_room(total, !device.is_cpu());

  ShardedTensors copies = tensors;
  std::vector<Piece> pieces;
  std::vector<std::pair<at::Tensor, at::Tensor>> others;  // copy, shard
  int64_t offset = 0;
  for (auto& [key, tensor] : copies) {
    const at::Tensor live = tensor.local.detach();
    const auto bytes = static_cast<int64_t>(live.numel() * live.element_size());
    tensor.local = buffer_.narrow(0, offset, bytes).view(live.scalar_type()).view(live.sizes());
    offset += place_of(live);
    if (live.device().is_cpu() && live.is_contiguous()) {
      pieces.push_back({static_cast<char*>(tensor.local.mutable_data_ptr()),
                        static_cast<const char*>(live.const_data_ptr()), bytes});
    } else {
      others.emplace_back(tensor.local, live);
    }
  }
  copy_pieces(pieces);
  copied_.reset();
  std::optional<c10::StreamGuard> beside;
  if (!device.is_cpu()) beside.emplace(copying_stream(device));
  for (const auto& [copy, live] : others) {
    copy.copy_(live, /*non_blocking=*/true);
    if (!live.device().is_cpu()) live.record_stream(*stream_);  // training may free it meanwhile
  }
  if (!device.is_cpu()) {
    copied_.emplace(device.type());
    copied_->record(*stream_);
  }
  return copies;
}

c10::Stream ShardSnapshot::copying_stream(c10::Device device) {
  if (!stream_ || stream_->device() != device)
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  order_streams(current_stream(device), *stream_);
  return *stream_;
}

void ShardSnapshot::before_changes() const {
  if (!copied_) return;
  copied_->block(current_stream(stream_->device()));
}

void ShardSnapshot::wait() const {
  if (copied_) copied_->synchronize();
}

}  // namespace megashard
