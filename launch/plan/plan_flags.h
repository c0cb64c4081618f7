#pragma once

#include "launch/arguments/command_line.h"

namespace megashard {

inline constexpr const char* kDefaultDevice = "h200";

/// Of --world-size; 1 without it.
int read_world_size(CommandLine& line);

}  // namespace megashard
