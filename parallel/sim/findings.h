#pragma once

#include <string>
#include <vector>

namespace megashard::sim {

/// Notes what is wrong with the program, one message; the same one is kept once.
void found(const std::string& message);
/// All since the last call.
std::vector<std::string> take_findings();
/// What called the running operation, innermost first, one function a line; for findings that show
/// stacks.
std::string call_stack();
/// The innermost function of this project (outside the simulated device) that is being called.
std::string calling_place();

}  // namespace megashard::sim
