#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace megashard {

/// Values as flags, YAML and ROLL write them. None: the text is no such value.

/// Also "+7".
std::optional<int64_t> parse_integer(std::string_view text);
/// "1e-4", "inf"; never NaN.
std::optional<double> parse_number(std::string_view text);
/// "bf16", "bfloat16", "fp32", "float32" and so on, also int8 to int64.
std::optional<at::ScalarType> parse_dtype(const std::string& name);

/// The parts between separators, without spaces around them: "a, b" -> a b. Empty parts stay.
std::vector<std::string> split_text(std::string_view text, std::string_view separators);
/// The names between commas, of all words: {"a, b", "c"} -> a b c. Empty names are dropped.
std::vector<std::string> comma_words(const std::vector<std::string>& words);

}  // namespace megashard
