#include "framework/arguments/typed_text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>

namespace megashard {
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
