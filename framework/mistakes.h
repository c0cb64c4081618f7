#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "framework/diagnostics.h"

namespace megashard {

/// Several mistakes reported together: what() is a line with their number, then one line for each, unknown flags first,
/// sorted. For one mistake it is its message.
class UsageErrors : public UsageError {
 public:
  explicit UsageErrors(std::vector<std::string> messages);
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::vector<std::string> messages_;
};

/// Runs `work` and converts its c10::ValueError, which reports invalid input, to UsageError.
void value_errors_are_mistakes(const std::function<void()>& work);

/// True if the message contains the flag as a word.
bool names_flag(const std::string& message, const std::string& flag);

/// Collects mistakes in flags and configuration files, to report all of them in one run.
class Mistakes {
 public:
  /// `flags`: those named in the message.
  void add(const std::string& message, const std::vector<std::string>& flags = {});
  /// Runs `step`; collects its UsageError and then returns false.
  bool attempt(const std::function<void()>& step, const std::vector<std::string>& flags = {});
  /// Checks a rule between flags and returns the condition. The message is dropped if it names a flag that has its own
  /// mistake, because it may only follow from that.
  bool require(bool condition, const std::string& message);
  /// Runs a step that later checks depend on; throws its error together with the collected ones.
  void attempt_or_throw(const std::function<void()>& step);
  bool none() const { return messages_.empty(); }
  /// Throws UsageErrors.
  void throw_if_any() const;

 private:
  std::vector<std::string> messages_;
  std::set<std::string> flags_;
};

}  // namespace megashard
