#pragma once

#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/key_log.h"

namespace megashard {

/// A configuration file, read with the reader that a training uses.
struct CheckedFile {
  std::string dialect;                ///< "FSDP2 file"
  KeyLog keys;                        ///< in the order of the file
  std::vector<std::string> mistakes;  ///< errors not tied to a key, each with its remedy
};

/// Checks a file. `role` selects one worker of a ROLL configuration; unset: all supported ones. Throws UsageError for a
/// file that cannot be read or has no known form.
CheckedFile check_file(const std::string& path, const std::optional<std::string>& role);

}  // namespace megashard
