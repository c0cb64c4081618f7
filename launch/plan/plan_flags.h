#pragma once

#include <string>

#include "launch/arguments/command_line.h"

namespace megashard {

inline constexpr const char* kDefaultDevice = "h200";

/// Says for which device there is a plan where `flag` does not.
std::string default_device_line(const std::string& flag);

/// Of --world-size; 1 without it.
int read_world_size(CommandLine& line);

}  // namespace megashard
