#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>

#include "parallel/fsdp/custom_comm.h"

namespace megashard {

/// How a group communicates: its run-time controls (fsdp_controls.h).
struct CommOptions {
  std::shared_ptr<AllGather> all_gather{};  ///< null: the group's
  std::shared_ptr<ReduceScatter> reduce_scatter{};
  std::optional<GroupMemory> memory{};  ///< of buffers; none: the allocator's
  std::function<void(at::Tensor&)> all_reduce_hook{};
  std::optional<c10::Stream> all_reduce_hook_stream{};  ///< none: that of the reduction
  std::optional<double> gradient_divide_factor{};
  bool force_sum_reduction = false;
};

/// Parameters of at least this many bytes a rank are gathered and reduced where they lie, on a CPU: two copies less
/// each way. Below, the latency of one more collective costs more than the copies (docs/group_life_cycle.md).
inline constexpr int64_t kMinInPlaceBytes = 256 * 1024;

/// A buffer of the custom communication (called `kind` in errors), of the group's memory, or of the allocator.
at::Tensor allocate_comm_buffer(Comm* custom, const char* kind, const std::optional<GroupMemory>& memory,
                                ProcessGroup& group, int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace megashard
