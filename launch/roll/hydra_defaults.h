#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace megashard {

/// The configuration that Hydra composes: `root`, which stands in the file `path`, with the files of
/// its `defaults:` list. These are FILE, group/FILE or group: FILE, relative to the file's folder, with
/// @PACKAGE: _here_, _global_, or the dotted key that takes them; in the list's order, the later one
/// counts, and `root` counts last unless `_self_` stands elsewhere. Throws UsageError, with file and
/// line, for a file that is not there and for entries of another form.
YAML::Node compose_defaults(const YAML::Node& root, const std::string& path);

}  // namespace megashard
