#pragma once

#include <string>

#include "launch/arguments/command_line.h"

namespace megashard {

inline constexpr const char* kDefaultDevice = "h200";

/// A line that names the device of the plan if `flag` is not given.
std::string default_device_line(const std::string& flag);

/// The value of --world-size; 1 by default.
int read_world_size(CommandLine& line);

}  // namespace megashard
