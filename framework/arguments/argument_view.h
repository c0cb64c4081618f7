#pragma once

#include <optional>
#include <string>

#include "framework/arguments/argument_value.h"

namespace megashard {

struct Arguments;

/// Validated arguments, read by name. For code that is compiled against installed headers: it needs no layout of
/// Arguments, so it keeps working if a flag is added.
class ArgumentView {
 public:
  /// `arguments` must outlive the view.
  explicit ArgumentView(const Arguments& arguments) : arguments_(&arguments) {}

  /// Value of the argument with Megatron's Namespace name ("hidden_size"); nullopt if it is None. T is bool, int64_t,
  /// double, std::string, std::vector<int64_t> or std::vector<std::string>; a choice is a std::string. Throws if the
  /// name is unknown or the type does not fit.
  template <class T>
  std::optional<T> get(const std::string& name) const {
    const ArgumentValue found = value(name);
    if (std::holds_alternative<std::monostate>(found)) return std::nullopt;
    auto typed = value_as<T>(found);
    if (!typed) fail_on_type(name, found);
    return typed;
  }
  /// As get(), without a type.
  ArgumentValue value(const std::string& name) const;

 private:
  [[noreturn]] static void fail_on_type(const std::string& name, const ArgumentValue& value);

  const Arguments* arguments_;
};

}  // namespace megashard
