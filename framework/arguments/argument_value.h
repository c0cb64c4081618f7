#pragma once

#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace megashard {

/// A value in Megatron's Namespace; monostate is None.
using ArgumentValue =
    std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<std::string>>;

/// Formats as Python's repr: True, None, 0.1, 1e-05, ['a', 'b'].
std::string argument_text(const ArgumentValue& value);
/// An int or float as a double; nullopt for other values.
std::optional<double> number_of(const ArgumentValue& value);
/// Compares values; numbers to 9 digits, because Python writes 1 for 1.0 and other programs may round the last digit
/// differently.
bool same_value(const ArgumentValue& a, const ArgumentValue& b);

/// The value as a T; ints convert to doubles, and integral doubles to ints. Nullopt if the type does not fit.
template <class T>
std::optional<T> value_as(const ArgumentValue& value) {
  if (const auto* same = std::get_if<T>(&value)) return *same;
  if constexpr (std::is_same_v<T, double>) return number_of(value);
  if constexpr (std::is_same_v<T, int64_t>) {
    const auto number = number_of(value);
    if (number && *number == std::floor(*number)) return static_cast<int64_t>(*number);
  }
  return std::nullopt;
}

namespace detail {

template <class T>
struct FieldType {
  using Inner = T;
  static constexpr bool kOptional = false;
};
template <class T>
struct FieldType<std::optional<T>> {
  using Inner = T;
  static constexpr bool kOptional = true;
};

template <class T>
inline constexpr bool kIsList = std::is_same_v<T, std::vector<int64_t>> || std::is_same_v<T, std::vector<std::string>>;

/// Reads a field; unset optionals and empty lists are None.
template <class T>
ArgumentValue read_field(const T& field) {
  if constexpr (FieldType<T>::kOptional) {
    return field ? ArgumentValue(*field) : ArgumentValue();
  } else if constexpr (kIsList<T>) {
    return field.empty() ? ArgumentValue() : ArgumentValue(field);
  } else {
    return field;
  }
}

/// Writes a field; false if the type does not fit.
template <class T>
bool write_field(T& field, const ArgumentValue& value) {
  constexpr bool kMayBeNone = FieldType<T>::kOptional || kIsList<T>;
  if constexpr (kMayBeNone) {
    if (std::holds_alternative<std::monostate>(value)) return field = T{}, true;
  }
  auto typed = value_as<typename FieldType<T>::Inner>(value);
  if (typed) field = std::move(*typed);
  return typed.has_value();
}

}  // namespace detail

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
