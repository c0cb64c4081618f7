#pragma once

#include <string>

#include "parallel/collectives/process_group.h"
#include "parallel/device/device_plan.h"

namespace megashard {

/// `megashard plan --measure`: the numbers of the machine at hand, of its GPU or its CPU, while all ranks of the group
/// measure the same. `folder`: whose disk counts. Collective; takes less than a minute.
DeviceModel measure_machine(const ProcessGroupPtr& group, const std::string& folder);

}  // namespace megashard
