#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// How a group's packed buffers are made and gathered (AllGather of FSDP2's custom communication).
/// Everything that the group gathers travels through it, in one buffer.
class AllGather {
 public:
  virtual ~AllGather() = default;
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) = 0;
  /// As ProcessGroup::all_gather_into, on the current stream.
  virtual Work run(at::Tensor output, at::Tensor input, ProcessGroup& group) = 0;
};

/// The same for reductions.
class ReduceScatter {
 public:
  virtual ~ReduceScatter() = default;
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype, c10::Device device) = 0;
  virtual Work run(at::Tensor output, at::Tensor input, ReduceOp op, ProcessGroup& group) = 0;
};

}  // namespace megashard
