#include "launch/shell/help_flags.h"

#include <algorithm>
#include <sstream>

#include "framework/arguments/typed_text.h"

namespace megashard {
namespace {

constexpr const char* kFlagLetters = "abcdefghijklmnopqrstuvwxyz0123456789-_";

/// The long name in "--json" or "-n,--processes".
std::string long_name(std::string word) {
  const auto begin = word.find("--");
  if (begin == word.npos) return "";
  word.erase(0, begin);
  return word.substr(0, word.find_first_not_of(kFlagLetters, 2));
}

/// Choices in "constant|linear"; empty for a type such as INT.
std::vector<std::string> choices_in(const std::string& word) {
  if (word.find('|') == word.npos) return {};
  auto choices = split_text(word, "|");
  std::erase_if(choices, [](const std::string& each) {
    return each.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == 0;
  });
  return choices;
}

}  // namespace

std::vector<HelpFlag> flags_in_help(const std::string& help) {
  std::vector<HelpFlag> flags;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  -")) continue;
    for (std::string rest; line.ends_with('|') && std::getline(lines, rest);) {
      line += rest.substr(std::min(rest.find_first_not_of(' '), rest.size()));  // long lists of choices are wrapped
    }
    // An explanation follows two spaces.
    const std::string usage = line.substr(2, line.find("  ", 2) - 2);
    std::istringstream words(usage);
    std::string word, value;
    words >> word >> value;
    const std::string name = long_name(word);
    if (name.size() < 3 || std::ranges::find(flags, name, &HelpFlag::name) != flags.end()) continue;
    const bool takes_value = !value.empty() && !value.starts_with("-") && !word.ends_with(",");
    flags.push_back({name, takes_value, takes_value ? choices_in(value) : std::vector<std::string>{}});
  }
  return flags;
}

}  // namespace megashard
