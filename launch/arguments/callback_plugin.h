#pragma once

#include <string>
#include <vector>

namespace megashard {

/// Loads the libraries that these words of a command line give to --callback-plugin. Call it before the table of
/// options is used, which then has the flags of their callbacks.
void load_callback_plugins(const std::vector<std::string>& words);

/// Loads a library with callbacks (framework/training/listener.h), which stays loaded. Does nothing if it is
/// loaded already. Throws UsageError if the file cannot be loaded, registers no callback, or was built against another
/// megashard or LibTorch.
void load_callback_plugin(const std::string& path);

}  // namespace megashard
