#pragma once

#include <string>

#include "parallel/collectives/process_group.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// `megashard plan --measure`: measures this machine, its GPU or CPU, while all ranks of the group do the same.
/// `folder` selects the disk. Collective; takes less than a minute.
DeviceModel measure_machine(const ProcessGroupPtr& group, const std::string& folder);

}  // namespace megashard
