#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "parallel/sharded_tensor.h"

namespace megashard {

/// A copy of a rank's shards in host memory, so that training may change them while they are
/// written (torch's DefaultStager). The memory is kept from one copy to the next: its pages are
/// touched, and for a GPU pinned, only once.
class ShardSnapshot {
 public:
  /// The same tensors with `local` on the CPU, contiguous; valid until the next take(). Shards on
  /// the CPU are copied on return, by as many threads as ATen has. Those on a GPU are copied on a
  /// stream of their own, behind what the current stream has been given so far: the host does not
  /// wait, and what follows on the current stream may read them. Call before_changes() before it
  /// changes them; wait() tells when the copies are there.
  ShardedTensors take(const ShardedTensors& tensors);
  /// The current stream waits for the copies; the host does not.
  void before_changes() const;
  void wait() const;  ///< from any thread

 private:
  void make_room(int64_t bytes, bool for_device);
  /// Behind what the current stream has been given so far.
  c10::Stream copying_stream(c10::Device device);

  at::Tensor buffer_;
  std::optional<c10::Stream> stream_;  // of a GPU; what copies
  std::optional<c10::Event> copied_;
};

}  // namespace megashard
