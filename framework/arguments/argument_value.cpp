#include "framework/arguments/argument_value.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>

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

namespace {

template <class T>
std::optional<T> parsed(std::string_view text) {
  T value{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(begin, end, value);
  return result.ec == std::errc() && result.ptr == end ? std::optional(value) : std::nullopt;
}

}  // namespace

std::optional<int64_t> parse_integer(std::string_view text) { return parsed<int64_t>(text); }

std::optional<double> parse_number(std::string_view text) {
  const auto number = parsed<double>(text);
  return number && std::isnan(*number) ? std::nullopt : number;
}

std::optional<at::ScalarType> parse_dtype(const std::string& name) {
  static const std::map<std::string, at::ScalarType> names = {
      {"fp16", at::kHalf},   {"float16", at::kHalf},      {"half", at::kHalf},   {"bf16", at::kBFloat16},
      {"fp32", at::kFloat},  {"bfloat16", at::kBFloat16}, {"float", at::kFloat}, {"float32", at::kFloat},
      {"fp64", at::kDouble}, {"float64", at::kDouble},    {"int8", at::kChar},   {"int16", at::kShort},
      {"int32", at::kInt},   {"int64", at::kLong}};
  std::string lower = name;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto found = names.find(lower);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::string> split_text(std::string_view text, std::string_view separators) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find_first_of(separators, begin), text.size());
    std::string part(text.substr(begin, end - begin));
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    parts.push_back(std::move(part));
    begin = end + 1;
  }
  return parts;
}

std::vector<std::string> comma_words(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const auto& word : words) {
    for (auto& name : split_text(word, ",")) {
      if (!name.empty()) names.push_back(std::move(name));
    }
  }
  return names;
}

}  // namespace megashard
