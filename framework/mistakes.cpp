#include "framework/mistakes.h"

#include <algorithm>
#include <cctype>

namespace megashard {

namespace {

std::vector<std::string> sorted(std::vector<std::string> sentences) {
  std::sort(sentences.begin(), sentences.end());
  sentences.erase(std::unique(sentences.begin(), sentences.end()), sentences.end());
  return sentences;
}

std::string told(const std::vector<std::string>& sentences) {
  if (sentences.size() == 1) return sentences.front();
  std::string text = std::to_string(sentences.size()) + " things must change:";
  for (const auto& each : sentences) text += "\n  " + each;
  return text;
}

bool is_of_flag(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_'; }

bool names(const std::string& sentence, const std::string& flag) {
  for (auto at = sentence.find(flag); at != sentence.npos; at = sentence.find(flag, at + 1)) {
    const auto end = at + flag.size();
    const bool begins = at == 0 || !is_of_flag(sentence[at - 1]);
    if (begins && (end == sentence.size() || !is_of_flag(sentence[end]))) return true;
  }
  return false;
}

}  // namespace

UsageErrors::UsageErrors(std::vector<std::string> sentences)
    : UsageError(told(sorted(sentences))), sentences_(sorted(std::move(sentences))) {}

void Mistakes::add(const std::string& sentence, const std::vector<std::string>& flags) {
  sentences_.push_back(sentence);
  flags_.insert(flags.begin(), flags.end());
}

bool Mistakes::attempt(const std::function<void()>& step, const std::vector<std::string>& flags) {
  try {
    step();
    return true;
  } catch (const UsageErrors& errors) {
    for (const auto& each : errors.sentences()) add(each, flags);
  } catch (const UsageError& error) {
    add(error.what(), flags);
  }
  return false;
}

bool Mistakes::require(bool condition, const std::string& sentence) {
  const bool follows =
      std::any_of(flags_.begin(), flags_.end(), [&](const std::string& flag) { return names(sentence, flag); });
  if (!condition && !follows) sentences_.push_back(sentence);
  return condition;
}

void Mistakes::tell_with(const std::function<void()>& step) {
  if (!attempt(step)) tell();
}

void Mistakes::tell() const {
  if (!none()) throw UsageErrors(sentences_);
}

}  // namespace megashard
