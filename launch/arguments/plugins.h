#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace megashard {

/// Reason why `path` cannot be a shared library of this machine: empty, truncated, an object file, or for another CPU.
/// Empty if no problem is found. Needed because dlopen reads past the end of a truncated file and crashes.
std::string why_no_shared_library(const std::string& path);

/// Loads the libraries that these words of a command line give to --callback-plugin and --loss-plugin. Call it before
/// the table of options is used, which then has the flags of their callbacks and objectives.
void load_plugins(const std::vector<std::string>& words);

/// A flag for libraries, and what they register.
struct PluginFlag {
  const char* flag;
  const char* what;      ///< "callback"
  const char* registry;  ///< "RegisterCallback"
  size_t (*known)();
  int64_t (*ignored)();  ///< those built against another megashard
};
/// Callbacks (framework/training/listener.h), objectives (framework/objectives/objectives.h). Their libraries may
/// register data formats, too (framework/data/data_formats.h).
extern const PluginFlag kCallbackPlugin, kLossPlugin;

/// Loads a library, which stays loaded. Does nothing if it is loaded already. Throws UsageError if the file cannot be
/// loaded, registers neither that kind nor a data format, or was built against another megashard or LibTorch.
void load_plugin(const PluginFlag& kind, const std::string& path);

}  // namespace megashard
