#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace megashard {

/// The configuration that Hydra composes: `root`, the content of the file `path`, with the files of its `defaults:`
/// list. Entries are FILE, group/FILE or group: FILE, relative to the file's folder, with @PACKAGE: _here_, _global_,
/// or the dotted key at which to insert them. Later entries override earlier ones, and `root` overrides all unless
/// `_self_` is listed elsewhere. Throws UsageError with file and line for missing files and for other entries.
YAML::Node compose_defaults(const YAML::Node& root, const std::string& path);

}  // namespace megashard
