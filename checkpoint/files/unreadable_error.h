#pragma once

#include <c10/util/Exception.h>

namespace megashard {

/// What is there and cannot be read now, but may be later: permission, a failing disk, a server
/// that does not answer, no memory or descriptors. What is missing, cut short or changed is a
/// plain c10::Error.
class UnreadableError : public c10::Error {
 public:
  using c10::Error::Error;
};

/// By errno of a call that reads: `message` gives path and reason.
[[noreturn]] void throw_read_failure(const std::string& message, int error);
/// There is no such file: no failure of reading.
bool is_not_there(int error);

}  // namespace megashard
