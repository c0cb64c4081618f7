#include "framework/mistakes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "parallel/collectives/agreement.h"

namespace megashard {

namespace {

/// Sorts misspelt flags before messages about missing ones.
std::vector<std::string> sorted(std::vector<std::string> messages) {
  std::ranges::sort(messages, {}, [](const std::string& message) {
    return std::pair(!message.starts_with("unknown flag "), message);
  });
  messages.erase(std::unique(messages.begin(), messages.end()), messages.end());
  return messages;
}

std::string told(const std::vector<std::string>& messages) {
  if (messages.size() == 1) return messages.front();
  std::string text = std::to_string(messages.size()) + " things must change:";
  for (const auto& each : messages) text += "\n  " + each;
  return text;
}

bool is_of_flag(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_'; }

}  // namespace

bool names_flag(const std::string& message, const std::string& flag) {
  for (auto at = message.find(flag); at != message.npos; at = message.find(flag, at + 1)) {
    const auto end = at + flag.size();
    const bool begins = at == 0 || !is_of_flag(message[at - 1]);
    if (begins && (end == message.size() || !is_of_flag(message[end]))) return true;
  }
  return false;
}

UsageErrors::UsageErrors(std::vector<std::string> messages)
    : UsageError(told(sorted(messages))), messages_(sorted(std::move(messages))) {}

void value_errors_are_mistakes(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::ValueError& error) {
    throw UsageError(error_text(error));
  }
}

void Mistakes::add(const std::string& message, const std::vector<std::string>& flags) {
  messages_.push_back(message);
  flags_.insert(flags.begin(), flags.end());
}

bool Mistakes::attempt(const std::function<void()>& step, const std::vector<std::string>& flags) {
  try {
    step();
    return true;
  } catch (const UsageErrors& errors) {
    for (const auto& each : errors.messages()) add(each, flags);
  } catch (const UsageError& error) {
    add(error.what(), flags);
  }
  return false;
}

bool Mistakes::require(bool condition, const std::string& message) {
  const bool follows =
      std::any_of(flags_.begin(), flags_.end(), [&](const std::string& flag) { return names_flag(message, flag); });
  if (!condition && !follows) messages_.push_back(message);
  return condition;
}

void Mistakes::attempt_or_throw(const std::function<void()>& step) {
  if (!attempt(step)) throw_if_any();
}

void Mistakes::throw_if_any() const {
  if (!none()) throw UsageErrors(messages_);
}

}  // namespace megashard
