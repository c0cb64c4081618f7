#pragma once

#include "parallel/collectives/process_group.h"

namespace megashard {

/// Backend "cpu:gloo,cuda:nccl": two groups of the same ranks, one per device type. A collective runs on its tensor's
/// device; strings and barriers use the CPU group. device_type() is the accelerator's.
ProcessGroupPtr make_routed_group(ProcessGroupPtr on_cpu, ProcessGroupPtr on_accelerator);

/// A new CPU group of the same ranks for threads besides training (make_group_apart). Collective. Throws if `group` has
/// no CPU backend.
ProcessGroupPtr make_host_group(const ProcessGroupPtr& group, const std::string& name);
bool has_host_backend(const ProcessGroupPtr& group);

}  // namespace megashard
