#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "framework/arguments/arguments.h"

namespace megashard {

/// A value as Megatron's Namespace holds it; monostate is None.
using ArgumentValue =
    std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<std::string>>;

/// Where an option's value lives; monostate for options without a field.
using ArgumentField = std::variant<std::monostate, bool Arguments::*, int64_t Arguments::*, double Arguments::*,
                                   std::string Arguments::*, std::optional<int64_t> Arguments::*,
                                   std::optional<double> Arguments::*, std::optional<std::string> Arguments::*,
                                   std::vector<int64_t> Arguments::*, std::vector<std::string> Arguments::*>;

enum class OptionStatus {
  kUsed,
  kWithoutEffect,  ///< accepted, changes nothing here; `reason` says why that is right
  kRefused,        ///< known, and an error with `reason`
  kComputed,       ///< no flag: computed by the program, printed and stored
};

/// A value that is known and an error, with the reason.
struct RefusedValue {
  std::string value;
  std::string reason;
};

/// One row: everything that parsing, YAML, help, the banner and the checkpoint's args know about an
/// option.
struct Option {
  /// At least one; of a foreign flag, none or more.
  static constexpr int kAnyNumber = -1;

  std::string group;
  std::string flag;  // "--num-layers"
  std::vector<std::string> aliases;
  std::string name;  // Megatron's Namespace name, "num_layers"
  ArgumentField field;
  bool switch_value = true;                  // what a switch stores
  int words = 1;                             // values that follow: 0 (a switch), a count or kAnyNumber
  std::string kind;                          // of its values, for the help: INT, FLOAT, DIR, FILE ...
  std::vector<std::string> choices;          // allowed values; empty: any
  std::vector<RefusedValue> refused_values;  // Megatron's other choices
  std::string neutral;                       // refused options only: a value that changes nothing and is let through
  std::string help;
  OptionStatus status = OptionStatus::kUsed;
  std::string reason;

  Option& alias(std::string other) { return aliases.push_back(std::move(other)), *this; }
  Option& named(std::string megatron_name) { return name = std::move(megatron_name), *this; }
  Option& one_of(std::vector<std::string> values) { return choices = std::move(values), *this; }
  Option& refuse_values(const std::vector<std::string>& values, const std::string& why) {
    for (const auto& value : values) refused_values.push_back({value, why});
    return *this;
  }
  Option& of_kind(std::string values) { return kind = std::move(values), *this; }
  Option& except(std::string value) { return neutral = std::move(value), *this; }
  Option& turns_off() { return switch_value = false, *this; }
  /// Stored and printed, but changes nothing.
  Option& in_vain(std::string why) {
    status = OptionStatus::kWithoutEffect;
    return reason = std::move(why), *this;
  }
  /// Stored and printed at its default; giving it is an error.
  Option& refuse(std::string why) {
    status = OptionStatus::kRefused;
    return reason = std::move(why), *this;
  }
  Option& count(int number) { return words = number, *this; }

  bool is_switch() const { return words == 0; }
};

/// Every option in the order of the help. The pointers of `field` fit any Arguments.
const std::vector<Option>& option_table();
/// By flag, alias or their snake case; `-` and `_` are equal. Null: unknown.
const Option* find_option(const std::string& spelling);
/// By Megatron's name ("add_bias_linear"), which differs from the flag for switches that turn
/// something off.
const Option* find_argument(const std::string& name);
/// All flags and aliases, for suggestions.
const std::vector<std::string>& option_spellings();
/// The names of all that a YAML file may hold, for suggestions.
const std::vector<std::string>& argument_names();

/// Stores the words that followed a flag (or stand in a YAML file) and marks the option as given. A
/// switch takes no word, or "true" / "false". Throws UsageError for refused options and values,
/// wrong types, counts and choices.
void set_option(const Option& option, const std::vector<std::string>& words, Arguments& arguments);

/// (Megatron name, value) of every option with a field: the checkpoint's args.
std::vector<std::pair<std::string, ArgumentValue>> argument_values(const Arguments& arguments);
/// The inverse for one name, for --use-checkpoint-args; false when the name is unknown or the type
/// does not fit.
bool set_argument_value(const std::string& name, const ArgumentValue& value, Arguments& arguments);
/// As Python prints it: True, None, 0.1, 1e-05, ['a', 'b'].
std::string argument_text(const ArgumentValue& value);

/// "--lr FLOAT": the flag with its choices or the kinds of its values.
std::string option_usage(const Option& option);
/// Lines of at most kHelpWidth columns.
inline constexpr size_t kHelpWidth = 80;
std::string help_lines(const std::string& text, size_t indent);
/// Options that are `shown`, by group with their defaults; then all that are accepted without
/// effect and all that are refused, by their reasons.
std::string options_help(const std::function<bool(const Option&)>& shown);

namespace detail {

/// Collects the rows of one group.
class OptionGroup {
 public:
  OptionGroup(std::string title, std::vector<Option>& rows) : title_(std::move(title)), rows_(rows) {}
  /// A row for a field; switches are those of bool fields, lists take one or more words. Numbers
  /// are of the kinds INT and FLOAT; other kinds need of_kind() or one_of().
  Option& add(std::string flag, ArgumentField field, std::string help);
  Option& computed(std::string name, ArgumentField field);
  Option& without_effect(std::string flag, int words, std::string reason);
  Option& refused(std::string flag, int words, std::string reason);

 private:
  Option& row(std::string flag, int words);

  std::string title_;
  std::vector<Option>& rows_;
};

void add_model_options(std::vector<Option>& rows);     // argument_table_model.cpp
void add_training_options(std::vector<Option>& rows);  // argument_table_training.cpp
void add_run_options(std::vector<Option>& rows);       // argument_table_run.cpp
void add_foreign_options(std::vector<Option>& rows);   // argument_table_foreign.cpp: refused or without effect

}  // namespace detail

}  // namespace megashard
