#pragma once

#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/key_log.h"

namespace megashard {

/// A configuration file, read by the reader that a training would take.
struct CheckedFile {
  std::string dialect;                ///< "FSDP2 file"
  KeyLog keys;                        ///< in the file's order
  std::vector<std::string> mistakes;  ///< that are of no key, each with its remedy
};

/// `role`: of a configuration of ROLL, this worker alone; unset: all that can be run here. Throws UsageError for a file
/// that cannot be read or is of no known form.
CheckedFile check_file(const std::string& path, const std::optional<std::string>& role);

}  // namespace megashard
