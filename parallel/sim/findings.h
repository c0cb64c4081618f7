#pragma once

#include <string>
#include <vector>

namespace megashard::sim {

/// Records an error of the program; equal messages are kept once.
void found(const std::string& message);
/// Errors since the last call.
std::vector<std::string> take_findings();
/// Call stack of the running operation, innermost first, one function per line; for findings with stacks.
std::string call_stack();
/// Innermost calling function of this project outside the simulated device.
std::string calling_place();

}  // namespace megashard::sim
