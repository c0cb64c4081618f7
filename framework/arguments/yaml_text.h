#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace megashard {

/// The YAML of a file's text. Throws UsageError, with `source` and the line, for text that is no
/// YAML and for a map that has a key twice, of which yaml-cpp would take either.
YAML::Node load_yaml(const std::string& text, const std::string& source);

}  // namespace megashard
