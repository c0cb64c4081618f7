#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "parallel/sharded_tensor.h"

namespace megashard {

/// A copy of a rank's shards in host memory, so that training may change them while they are written (torch's
/// DefaultStager). The memory is reused, so its pages are touched, and pinned for a GPU, only once.
class ShardSnapshot {
 public:
  /// Returns the tensors with `local` on the CPU, contiguous; valid until the next take(). CPU shards are copied on
  /// return, by as many threads as ATen has. GPU shards are copied on a separate stream after the work queued on the
  /// current stream; the host is not blocked. Later work on the current stream may read the shards; call
  /// before_changes() before it changes them. wait() blocks until the copies are complete.
  ShardedTensors take(const ShardedTensors& tensors);
  /// Makes the current stream wait for the copies. Does not block the host.
  void before_changes() const;
  void wait() const;  ///< blocks the host; callable from any thread

 private:
  void make_room(int64_t bytes, bool for_device);
  /// Returns the copy stream after it waits for the current stream.
  c10::Stream copying_stream(c10::Device device);

  at::Tensor buffer_;
  std::optional<c10::Stream> stream_;  // copy stream of a GPU
  std::optional<c10::Event> copied_;
};

}  // namespace megashard
