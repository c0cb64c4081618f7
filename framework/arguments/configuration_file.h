#pragma once

#include <string>

namespace megashard {

/// The text of a configuration file that flags name; `name` stands before its path in messages:
/// "--config". Throws UsageError, which says what is wrong with the path: nothing is there, a
/// folder, no regular file, not to be read, or empty.
std::string read_configuration(const std::string& path, const std::string& name);

}  // namespace megashard
