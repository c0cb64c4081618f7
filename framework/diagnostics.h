#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace megashard {

enum class Severity { kNotice, kWarning };

/// Receives messages for the user; the caller decides where they go. Library code never prints.
using DiagnosticSink = std::function<void(Severity severity, const std::string& message)>;

/// A mistake in flags or configuration files: one message with the remedy. The program exits with code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A mistake in this process's own environment, which other ranks may not share.
class OwnUsageError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Throws UsageError unless the condition holds.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw UsageError(message);
}

}  // namespace megashard
