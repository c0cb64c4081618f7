#pragma once

#include <string>

namespace megashard {

/// Reads the configuration file of a flag; `name` precedes its path in messages: "--config". Throws UsageError with the
/// problem of the path: missing, a folder, not a regular file, unreadable, or empty.
std::string read_configuration(const std::string& path, const std::string& name);

}  // namespace megashard
