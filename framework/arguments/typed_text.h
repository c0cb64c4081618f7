#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace megashard {

/// Parsers for values in flags, YAML and ROLL. Nullopt if the text is not such a value.

/// Accepts "+7".
std::optional<int64_t> parse_integer(std::string_view text);
/// "1e-4", "inf"; never NaN.
std::optional<double> parse_number(std::string_view text);
/// "bf16", "bfloat16", "fp32", "float32" and so on, also int8 to int64.
std::optional<at::ScalarType> parse_dtype(const std::string& name);

/// Splits at separators and strips spaces: "a, b" -> a b. Keeps empty parts.
std::vector<std::string> split_text(std::string_view text, std::string_view separators);
/// Splits all words at commas: {"a, b", "c"} -> a b c. Drops empty names.
std::vector<std::string> comma_words(const std::vector<std::string>& words);

}  // namespace megashard
