#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

/// Several mistakes told at once: what() is a line that counts them, and one for each, unknown flags
/// first, sorted; of a single one its message alone.
class UsageErrors : public UsageError {
 public:
  explicit UsageErrors(std::vector<std::string> messages);
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::vector<std::string> messages_;
};

/// Runs `work`; a c10::ValueError of it, which says that what was given is wrong, becomes a UsageError.
void value_errors_are_mistakes(const std::function<void()>& work);

/// Whether the message has that flag as a word.
bool names_flag(const std::string& message, const std::string& flag);

/// Collects mistakes in flags and configuration files, so that one run tells them all.
class Mistakes {
 public:
  /// `flags`: those that the message is about.
  void add(const std::string& message, const std::vector<std::string>& flags = {});
  /// Adds what `step` throws as UsageError; false then.
  bool attempt(const std::function<void()>& step, const std::vector<std::string>& flags = {});
  /// A rule between flags; returns the condition. A message that names a flag with a mistake of
  /// its own is left out: it may only follow from that one.
  bool require(bool condition, const std::string& message);
  /// Runs a step that nothing can be checked without: what it throws is told with the others.
  void attempt_or_throw(const std::function<void()>& step);
  bool none() const { return messages_.empty(); }
  /// Throws UsageErrors.
  void throw_if_any() const;

 private:
  std::vector<std::string> messages_;
  std::set<std::string> flags_;
};

}  // namespace megashard
