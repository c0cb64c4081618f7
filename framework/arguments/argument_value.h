#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace megashard {

/// A value as Megatron's Namespace holds it; monostate is None.
using ArgumentValue =
    std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<std::string>>;

/// As Python prints it: True, None, 0.1, 1e-05, ['a', 'b'].
std::string argument_text(const ArgumentValue& value);
/// Of whole numbers and others; none of anything else.
std::optional<double> number_of(const ArgumentValue& value);
/// Python writes 1 for 1.0, and fractions of other programs may differ in the last digit: numbers are compared as
/// such, to 9 digits.
bool same_value(const ArgumentValue& a, const ArgumentValue& b);

/// The value as a T; whole numbers count as doubles, and the other way round. None when the type does not fit.
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

/// Unset optionals and empty lists are None.
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

/// False when the type does not fit.
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

}  // namespace megashard
