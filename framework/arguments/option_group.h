#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_table.h"

namespace megashard::detail {

/// Attributes common to the rows of a group. Rows with other attributes use another OptionGroup of the same title, or
/// set them (taken_from_checkpoint).
struct OptionDefaults {
  bool pretrain_only = false, from_checkpoint = false, in_scheduler_state = false;
};

/// Adds the rows of one group, in the order of the help.
class OptionGroup {
 public:
  OptionGroup(std::string title, std::vector<Option>& rows, OptionDefaults defaults = {})
      : title_(std::move(title)), rows_(rows), defaults_(defaults) {}

  /// Adds a row for a field: bool fields are switches, lists take one or more words. Numbers are shown as INT and
  /// FLOAT; other values need shown_as() or one_of().
  template <class Struct, class Field>
  Option& add(std::string flag, Field Struct::*member, OnResume on_resume, std::string help) {
    Option& option = row(std::move(flag), type_of<typename FieldType<Field>::Inner>());
    option.read = [member](const Arguments& arguments) { return read_field(arguments.*member); };
    option.write = [member](const ArgumentValue& value, Arguments& arguments) {
      return write_field(arguments.*member, value);
    };
    option.on_resume = on_resume;
    option.help = std::move(help);
    return option;
  }

  /// Adds a row for an enum or optional enum, whose values have names.
  template <class Struct, class Field, class Enum = typename FieldType<Field>::Inner>
  Option& choice(std::string flag, Field Struct::*member, OnResume on_resume,
                 std::initializer_list<std::pair<const char*, std::type_identity_t<Enum>>> choices, std::string help) {
    Option& option = row(std::move(flag), ValueType::kText);
    const std::vector<std::pair<std::string, Enum>> named(choices.begin(), choices.end());
    for (const auto& [name, value] : named) {
      option.choices.push_back(name);
      option.choice_values.push_back(static_cast<int>(value));
    }
    option.read = [member, named](const Arguments& arguments) -> ArgumentValue {
      const std::optional<Enum> ours = arguments.*member;
      for (const auto& [name, value] : named) {
        if (ours == value) return name;
      }
      return {};
    };
    option.write = [member, named](const ArgumentValue& value, Arguments& arguments) {
      for (const auto& [name, each] : named) {
        if (value == ArgumentValue(name)) return arguments.*member = each, true;
      }
      const bool is_none = FieldType<Field>::kOptional && std::holds_alternative<std::monostate>(value);
      if (is_none) arguments.*member = Field{};
      return is_none;
    };
    option.on_resume = on_resume;
    option.help = std::move(help);
    return option;
  }

  /// Adds a row for a number in a map, under its flag; `initial` while the map lacks it.
  template <class Struct>
  Option& number(std::string flag, std::map<std::string, double> Struct::*map, double initial, OnResume on_resume,
                 std::string help) {
    Option& option = row(flag, ValueType::kNumber);
    option.read = [map, flag, initial](const Arguments& arguments) -> ArgumentValue {
      const auto found = (arguments.*map).find(flag);
      return found == (arguments.*map).end() ? initial : found->second;
    };
    option.write = [map, flag](const ArgumentValue& value, Arguments& arguments) {
      return write_field((arguments.*map)[flag], value);
    };
    option.on_resume = on_resume;
    option.help = std::move(help);
    return option;
  }

  /// The same for one of some words, whose place among them is the number.
  template <class Struct>
  Option& word(std::string flag, std::map<std::string, double> Struct::*map, double initial,
               const std::vector<std::string>& words, OnResume on_resume, std::string help) {
    Option& option = row(flag, ValueType::kText);
    option.read = [map, flag, initial, words](const Arguments& arguments) -> ArgumentValue {
      const auto found = (arguments.*map).find(flag);
      return words.at(static_cast<size_t>(found == (arguments.*map).end() ? initial : found->second));
    };
    option.write = [map, flag, words](const ArgumentValue& value, Arguments& arguments) {
      for (size_t place = 0; place < words.size(); ++place) {
        if (value == ArgumentValue(words[place])) return (arguments.*map)[flag] = static_cast<double>(place), true;
      }
      return false;
    };
    option.on_resume = on_resume;
    option.help = std::move(help);
    return option.one_of(words);
  }

  /// Adds a field without a flag.
  template <class Struct, class Field>
  Option& computed(std::string name, Field Struct::*member, OnResume on_resume = OnResume::kFree) {
    Option& option = add("", member, on_resume, "");
    option.status = OptionStatus::kComputed;
    return option.named(std::move(name));
  }

  /// Adds a count of a run, which checkpoints hold among the arguments: 0 here (Progress).
  Option& counted(std::string name) {
    Option& option = row("", ValueType::kInteger);
    option.read = [](const Arguments&) -> ArgumentValue { return int64_t{0}; };
    option.write = [](const ArgumentValue& value, Arguments&) { return value == ArgumentValue(int64_t{0}); };
    option.status = OptionStatus::kComputed;
    return option.named(std::move(name));
  }

  /// Add flags without a field.
  Option& without_effect(std::string flag, int nargs, std::string reason) {
    return row(std::move(flag), ValueType::kNone).nargs_of(nargs).no_effect(std::move(reason));
  }
  Option& refused(std::string flag, int nargs, std::string reason) {
    return row(std::move(flag), ValueType::kNone).nargs_of(nargs).refuse(std::move(reason));
  }

 private:
  template <class T>
  static ValueType type_of() {
    if (std::is_same_v<T, bool>) return ValueType::kSwitch;
    if (std::is_same_v<T, int64_t>) return ValueType::kInteger;
    if (std::is_same_v<T, double>) return ValueType::kNumber;
    if (std::is_same_v<T, std::vector<int64_t>>) return ValueType::kIntegers;
    return std::is_same_v<T, std::string> ? ValueType::kText : ValueType::kTexts;
  }

  Option& row(std::string flag, ValueType type);

  std::string title_;
  std::vector<Option>& rows_;
  OptionDefaults defaults_;
};

}  // namespace megashard::detail
