#pragma once

#include "parallel/collectives/process_group.h"

namespace megashard {

/// The backend "cpu:gloo,cuda:nccl": one group of the same ranks for each kind of device. A
/// collective runs where its tensor is; strings and barriers go through the CPU. device_type() is
/// the accelerator's.
ProcessGroupPtr make_routed_group(ProcessGroupPtr on_cpu, ProcessGroupPtr on_accelerator);

/// A new group of the same ranks on the CPU, for threads beside the training (make_group_apart). Collective. Throws
/// when `group` has no backend for the CPU.
ProcessGroupPtr make_host_group(const ProcessGroupPtr& group, const std::string& name);
bool has_host_backend(const ProcessGroupPtr& group);

}  // namespace megashard
