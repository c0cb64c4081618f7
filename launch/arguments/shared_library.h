#pragma once

#include <string>

namespace megashard {

/// Reason why `path` cannot be a shared library of this machine: empty, truncated, an object file, or for another CPU.
/// Empty if no problem is found. Needed because dlopen reads past the end of a truncated file and crashes.
std::string why_no_shared_library(const std::string& path);

}  // namespace megashard
