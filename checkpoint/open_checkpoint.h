#pragma once

#include <memory>
#include <string>

#include "checkpoint/dcp/dcp_reader.h"

namespace megashard {

/// The folder of a step, in either format. Throws for others; reads metadata, and no tensor.
std::unique_ptr<DcpReader> open_step(const std::string& folder);

}  // namespace megashard
