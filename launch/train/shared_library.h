#pragma once

#include <string>

namespace megashard {

/// Why `path` cannot be a shared library of this machine: empty, cut off, an object file, of
/// another processor. Empty where nothing speaks against it. dlopen itself reads beyond the end of
/// a file that is cut off, which ends the process.
std::string why_no_shared_library(const std::string& path);

}  // namespace megashard
