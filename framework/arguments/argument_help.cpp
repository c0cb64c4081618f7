#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>

#include "framework/arguments/argument_help.h"
#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

constexpr size_t kUsageIndent = 2, kTextIndent = 6;

/// Words and, of usages, choices: a line may end after each.
std::vector<std::string> breakable(const std::string& text) {
  std::vector<std::string> pieces(1);
  for (const char c : text) {
    pieces.back() += c;
    if (c == ' ' || c == '|') pieces.emplace_back();
  }
  return pieces;
}

std::string wrapped(const std::string& text, size_t first, size_t indent) {
  std::string lines;
  size_t column = first;
  for (const auto& piece : breakable(text)) {
    const size_t shown = piece.ends_with(' ') ? piece.size() - 1 : piece.size();
    if (column > indent && column + shown > kHelpWidth) {
      if (lines.ends_with(' ')) lines.pop_back();
      lines += "\n" + std::string(indent, ' ');
      column = indent;
    }
    lines += piece;
    column += piece.size();
  }
  return lines;
}

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
  return "  " + wrapped(usage, kUsageIndent, kTextIndent) + "\n" + help_lines(help_text(option, defaults), kTextIndent);
}

}  // namespace

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

std::string help_lines(const std::string& text, size_t indent) {
  return std::string(indent, ' ') + wrapped(text, indent, indent) + "\n";
}

std::string options_help(const std::function<bool(const Option&)>& shown) {
  const Arguments defaults;
  std::string text, group;
  std::vector<std::string> reasons[2];                    // in the table's order
  std::map<std::string, std::vector<std::string>> of[2];  // the flags of a reason
  const auto list = [&](int which, const std::string& reason, const std::string& what) {
    auto& flags = of[which][reason];
    if (flags.empty()) reasons[which].push_back(reason);
    flags.push_back(what);
  };
  for (const auto& option : option_table()) {
    if (option.status == OptionStatus::kComputed) continue;
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
    text += std::string("\n") + titles[which] + ":\n";
    for (const auto& reason : reasons[which]) {
      text += "  " + wrapped(c10::Join(", ", of[which][reason]), kUsageIndent, kUsageIndent) + "\n" +
              help_lines(reason, kTextIndent);
    }
  }
  return text;
}

}  // namespace megashard
