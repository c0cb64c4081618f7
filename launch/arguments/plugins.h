#pragma once

#include <string>
#include <vector>

namespace megashard {

/// Reason why `path` cannot be a shared library of this machine: empty, truncated, an object file, or for another CPU.
/// Empty if no problem is found. Needed because dlopen reads past the end of a truncated file and crashes.
std::string why_no_shared_library(const std::string& path);

/// Loads the libraries that these words of a command line give to --callback-plugin. Call it before the table of
/// options is used, which then has the flags of their callbacks.
void load_callback_plugins(const std::vector<std::string>& words);

/// Loads a library with callbacks (framework/training/register_callback.h), which stays loaded. Does nothing if it is
/// loaded already. Throws UsageError if the file cannot be loaded, registers no callback, or was built against another
/// megashard or LibTorch.
void load_callback_plugin(const std::string& path);

}  // namespace megashard
