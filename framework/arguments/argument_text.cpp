#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <type_traits>

#include "framework/arguments/argument_table.h"

namespace megashard {

namespace {

constexpr size_t kUsageIndent = 2, kTextIndent = 6;

/// repr() of a Python float: shortest round-trip digits, fixed notation for exponents -4 .. 15.
std::string python_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  constexpr int kSmallestFixed = -4, kLargestFixed = 15;
  const double magnitude = std::fabs(value);
  int exponent = 0;
  char buffer[64];
  const auto scientific = std::to_chars(buffer, buffer + sizeof buffer, magnitude, std::chars_format::scientific);
  const std::string text(buffer, scientific.ptr);
  const auto letter = text.find('e');
  const char* digits = text.data() + letter + (text[letter + 1] == '+' ? 2 : 1);
  std::from_chars(digits, text.data() + text.size(), exponent);
  const std::string sign = std::signbit(value) ? "-" : "";
  if (exponent < kSmallestFixed || exponent > kLargestFixed) return sign + text;
  const auto fixed = std::to_chars(buffer, buffer + sizeof buffer, magnitude, std::chars_format::fixed);
  std::string plain(buffer, fixed.ptr);
  if (plain.find('.') == plain.npos) plain += ".0";
  return sign + plain;
}

template <class T, class Text>
std::string list_text(const std::vector<T>& values, Text text) {
  std::string joined = "[";
  for (size_t i = 0; i < values.size(); ++i) joined += (i == 0 ? "" : ", ") + text(values[i]);
  return joined + "]";
}

struct ToText {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool value) const { return value ? "True" : "False"; }
  std::string operator()(int64_t value) const { return std::to_string(value); }
  std::string operator()(double value) const { return python_text(value); }
  std::string operator()(const std::string& value) const { return value; }
  std::string operator()(const std::vector<int64_t>& values) const {
    return list_text(values, [](int64_t value) { return std::to_string(value); });
  }
  std::string operator()(const std::vector<std::string>& values) const {
    return list_text(values, [](const std::string& value) { return "'" + value + "'"; });
  }
};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <class T>
ArgumentValue value_of(const T& field) {
  if constexpr (IsOptional<T>::value) {
    return field ? ArgumentValue(*field) : ArgumentValue();
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>> || std::is_same_v<T, std::vector<std::string>>) {
    return field.empty() ? ArgumentValue() : ArgumentValue(field);
  } else {
    return field;
  }
}

/// False when the types do not fit; integers fit doubles.
template <class T>
bool assign(T& field, const ArgumentValue& value) {
  if constexpr (IsOptional<T>::value) {
    if (std::holds_alternative<std::monostate>(value)) return field.reset(), true;
    typename T::value_type inner{};
    if (!assign(inner, value)) return false;
    return field = std::move(inner), true;
  } else {
    if (const auto* same = std::get_if<T>(&value)) return field = *same, true;
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* whole = std::get_if<int64_t>(&value)) {
        return field = static_cast<double>(*whole), true;
      }
    }
    if constexpr (std::is_same_v<T, std::vector<int64_t>> || std::is_same_v<T, std::vector<std::string>>) {
      if (std::holds_alternative<std::monostate>(value)) return field.clear(), true;
    }
    return false;
  }
}

ArgumentValue read_field(const Option& option, const Arguments& arguments) {
  return std::visit(
      [&](auto member) -> ArgumentValue {
        if constexpr (std::is_same_v<decltype(member), std::monostate>) {
          return {};
        } else {
          return value_of(arguments.*member);
        }
      },
      option.field);
}

bool has_field(const Option& option) { return !std::holds_alternative<std::monostate>(option.field); }

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
  if (option.is_switch()) return option.help;
  const auto value = read_field(option, defaults);
  if (std::holds_alternative<std::monostate>(value)) return option.help;
  return option.help + " [" + argument_text(value) + "]";
}

}  // namespace

std::string argument_text(const ArgumentValue& value) { return std::visit(ToText{}, value); }

std::vector<std::pair<std::string, ArgumentValue>> argument_values(const Arguments& arguments) {
  std::vector<std::pair<std::string, ArgumentValue>> values;
  for (const auto& option : option_table()) {
    if (has_field(option)) values.emplace_back(option.name, read_field(option, arguments));
  }
  return values;
}

bool set_argument_value(const std::string& name, const ArgumentValue& value, Arguments& arguments) {
  const Option* option = find_argument(name);
  if (option == nullptr) return false;
  return std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), std::monostate>) {
          return false;
        } else {
          return assign(arguments.*member, value);
        }
      },
      option->field);
}

std::string option_usage(const Option& option) {
  std::string usage = option.flag;
  if (!option.choices.empty()) {
    usage += " ";
    for (size_t i = 0; i < option.choices.size(); ++i) usage += (i == 0 ? "" : "|") + option.choices[i];
  } else {
    const int shown = option.words == Option::kAnyNumber ? 1 : option.words;
    for (int i = 0; i < shown; ++i) usage += " " + option.kind;
  }
  return usage + (option.words == Option::kAnyNumber ? " ..." : "");
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
    std::string usage = option_usage(option);
    for (const auto& other : option.aliases) usage += ", " + other;
    text +=
        "  " + wrapped(usage, kUsageIndent, kTextIndent) + "\n" + help_lines(help_text(option, defaults), kTextIndent);
  }
  const char* titles[] = {"accepted, without effect here", "known, but refused"};
  for (int which = 0; which < 2; ++which) {
    text += std::string("\n") + titles[which] + ":\n";
    for (const auto& reason : reasons[which]) {
      std::string flags;
      for (const auto& flag : of[which][reason]) flags += (flags.empty() ? "" : ", ") + flag;
      text += "  " + wrapped(flags, kUsageIndent, kUsageIndent) + "\n" + help_lines(reason, kTextIndent);
    }
  }
  return text;
}

}  // namespace megashard
