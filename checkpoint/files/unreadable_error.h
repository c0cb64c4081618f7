#pragma once

#include <c10/util/Exception.h>

namespace megashard {

/// A file that exists but cannot be read now, and maybe can later: no permission, a failing disk, a server that does
/// not answer, no memory or descriptors. A missing, truncated or changed file is a plain c10::Error.
class UnreadableError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// Throws UnreadableError, or c10::Error if `error` says that the file does not exist. `message` has path and reason.
[[noreturn]] void throw_read_failure(const std::string& message, int error);
/// True if this errno means that the file does not exist.
bool is_not_there(int error);

}  // namespace megashard
