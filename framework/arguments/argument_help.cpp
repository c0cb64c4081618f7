#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "framework/arguments/argument_help.h"
#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

constexpr size_t kUsageIndent = 2, kTextIndent = 6;

std::string help_text(const Option& option, const Arguments& defaults) {
  std::string text = option.help;
  if (option.is_switch() && !option.switch_value) text += "; in YAML also " + option.name + ": false";
  if (const auto range = range_text(option.range); !range.empty()) text += "; " + range;
  if (option.on_resume == OnResume::kMustMatch) text += "; must match a resumed checkpoint";
  const auto value = option.read(defaults);
  if (option.is_switch() || std::holds_alternative<std::monostate>(value)) return text;
  return text + " [" + argument_text(value) + "]";
}

std::string lines_of(const Option& option, const Arguments& defaults) {
  std::string usage = option_usage(option);
  for (const auto& other : option.aliases) usage += ", " + other;
  return "  " + wrapped_text(usage, kUsageIndent, kTextIndent) + "\n" +
         help_lines(help_text(option, defaults), kTextIndent);
}

std::string lower_with_dashes(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return c == '_' ? '-' : std::tolower(c); });
  return text;
}

/// Help for the `wanted` options: used and `shown` ones by group, then those without effect and refused ones, by
/// reason.
std::string help_of(const std::function<bool(const Option&)>& wanted, const std::function<bool(const Option&)>& shown) {
  const Arguments defaults;
  std::string text, group;
  std::vector<std::string> reasons[2];                    // in the order of the table
  std::map<std::string, std::vector<std::string>> of[2];  // flags with that reason
  const auto list = [&](int which, const std::string& reason, const std::string& what) {
    auto& flags = of[which][reason];
    if (flags.empty()) reasons[which].push_back(reason);
    flags.push_back(what);
  };
  for (const auto& option : option_table()) {
    if (option.status == OptionStatus::kComputed || !wanted(option)) continue;
    if (option.status == OptionStatus::kWithoutEffect) list(0, option.reason, option.flag);
    if (option.status == OptionStatus::kRefused) list(1, option.reason, option.flag);
    for (const auto& refused : option.refused_values) list(1, refused.reason, option.flag + " " + refused.value);
    if (option.status != OptionStatus::kUsed || !shown(option)) continue;
    if (option.group != group) {
      group = option.group;
      text += "\n" + group + ":\n";
    }
    text += lines_of(option, defaults);
  }
  const char* titles[] = {"accepted, without effect here", "known, but refused"};
  for (int which = 0; which < 2; ++which) {
    if (!reasons[which].empty()) text += std::string("\n") + titles[which] + ":\n";
    for (const auto& reason : reasons[which]) {
      text += "  " + wrapped_text(c10::Join(", ", of[which][reason]), kUsageIndent, kUsageIndent) + "\n" +
              help_lines(reason, kTextIndent);
    }
  }
  return text;
}

}  // namespace

bool has_words(const std::string& flag, const std::string& help, const std::vector<std::string>& words) {
  const std::string name = lower_with_dashes(flag), text = " " + lower_with_dashes(help) + " ";
  return std::ranges::all_of(words, [&](const std::string& each) {
    const std::string word = lower_with_dashes(each);
    if (name.find(word) != name.npos) return true;
    for (size_t at = text.find(word, 1); at != text.npos; at = text.find(word, at + 1)) {
      if (std::isalnum(static_cast<unsigned char>(text[at - 1])) == 0 &&
          std::isalnum(static_cast<unsigned char>(text[at + word.size()])) == 0)
        return true;
    }
    return false;
  });
}

std::vector<std::string> option_groups() {
  std::vector<std::string> groups;
  for (const auto& option : option_table()) {
    const bool listed = option.status == OptionStatus::kUsed;
    if (listed && std::ranges::find(groups, option.group) == groups.end()) groups.push_back(option.group);
  }
  return groups;
}

std::string group_help(const std::string& group, const std::function<bool(const Option&)>& shown) {
  const Arguments defaults;
  std::string text = group + ":\n";
  for (const auto& option : option_table()) {
    if (option.status == OptionStatus::kUsed && option.group == group && shown(option))
      text += lines_of(option, defaults);
  }
  return text;
}

std::string option_usage(const Option& option) {
  std::string usage = option.flag;
  const int shown = option.nargs == Option::kAnyNumber ? 1 : option.nargs;
  if (option.choices.empty()) {
    for (int i = 0; i < shown; ++i) usage += " " + option.metavar;
  } else {
    usage += " " + c10::Join("|", option.choices);
  }
  return usage + (option.nargs == Option::kAnyNumber ? " ..." : "");
}

std::string flag_help(const Option& option) {
  return help_of([&](const Option& each) { return &each == &option; }, [](const Option&) { return true; });
}

std::string search_help(const std::vector<std::string>& words, const std::function<bool(const Option&)>& shown) {
  const auto has = [&](const Option& each) {
    return has_words(each.flag + " " + c10::Join(" ", each.aliases), each.help, words);
  };
  return help_of(has, shown);
}

std::string options_help(const std::function<bool(const Option&)>& shown) {
  return help_of([](const Option&) { return true; }, shown);
}

}  // namespace megashard
