#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>

#include "parallel/fsdp/custom_comm.h"

namespace megashard {

/// Communication settings of a group (run-time controls, fsdp_controls.h).
struct CommOptions {
  std::shared_ptr<AllGather> all_gather{};  ///< null: the process group's
  std::shared_ptr<ReduceScatter> reduce_scatter{};
  ProcessGroupPtr reduce_scatter_group{};  ///< same ranks as the sharding group's; null: that group
  std::optional<GroupMemory> memory{};     ///< memory of buffers; unset: the allocator's
  std::function<void(at::Tensor&)> all_reduce_hook{};
  std::optional<c10::Stream> all_reduce_hook_stream{};  ///< unset: the reduction's stream
  std::optional<double> gradient_divide_factor{};
  bool force_sum_reduction = false;
};

/// On a CPU, parameters of at least this many bytes per rank are all-gathered and reduced in place, which saves two
/// copies each way. For smaller ones the extra collective's latency costs more than the copies
/// (docs/group_life_cycle.md).
inline constexpr int64_t kMinInPlaceBytes = 256 * 1024;

/// Allocates from `custom` (named `kind` in errors) if set, else from the group's memory if set, else from the
/// allocator.
at::Tensor allocate_comm_buffer(Comm* custom, const char* kind, const std::optional<GroupMemory>& memory,
                                ProcessGroup& group, int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace megashard
