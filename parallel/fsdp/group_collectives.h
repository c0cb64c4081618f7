#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/collectives/process_group.h"

namespace megashard {

/// How a group's packed buffers are made and gathered (AllGather of FSDP2's custom communication).
/// Everything that the group gathers travels through it, in one buffer.
class AllGather {
 public:
  virtual ~AllGather() = default;
  /// Contiguous, of exactly that size; something else is refused.
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

/// `buffer`, which `allocator` returned, if it is contiguous, of `numel` elements of `dtype` and on
/// `device`; throws a sentence otherwise: copies into it go by address.
at::Tensor checked_buffer(at::Tensor buffer, const char* allocator, int64_t numel,
                          at::ScalarType dtype, c10::Device device);

}  // namespace megashard
