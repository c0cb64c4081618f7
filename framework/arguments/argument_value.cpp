#include "framework/arguments/argument_value.h"

#include <algorithm>
#include <charconv>

#include <c10/util/StringUtil.h>

namespace megashard {
namespace {

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

struct ToText {
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(bool value) const { return value ? "True" : "False"; }
  std::string operator()(int64_t value) const { return std::to_string(value); }
  std::string operator()(double value) const { return python_text(value); }
  std::string operator()(const std::string& value) const { return value; }
  std::string operator()(const std::vector<int64_t>& values) const { return "[" + c10::Join(", ", values) + "]"; }
  std::string operator()(const std::vector<std::string>& values) const {
    return "['" + c10::Join("', '", values) + "']";
  }
};

}  // namespace

std::string argument_text(const ArgumentValue& value) { return std::visit(ToText{}, value); }

std::optional<double> number_of(const ArgumentValue& value) {
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  if (const auto* number = std::get_if<double>(&value)) return *number;
  return std::nullopt;
}

bool same_value(const ArgumentValue& a, const ArgumentValue& b) {
  constexpr double kRounding = 1e-9;
  if (a == b) return true;
  const auto x = number_of(a), y = number_of(b);
  const bool whole = std::holds_alternative<int64_t>(a) && std::holds_alternative<int64_t>(b);
  return x && y && !whole && std::abs(*x - *y) <= kRounding * std::max(std::abs(*x), std::abs(*y));
}

}  // namespace megashard
