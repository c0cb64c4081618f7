#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/arguments.h"
#include "framework/mistakes.h"

namespace megashard {

struct YamlValue;

enum class OptionStatus {
  kUsed,
  kWithoutEffect,  ///< accepted, changes nothing here; `reason` explains why
  kRefused,        ///< known, but an error with `reason`
  kComputed,       ///< no flag: computed by the program, logged and stored
};

/// Action of a resume if a value differs from the checkpoint's.
enum class OnResume {
  kMustMatch,  ///< error: the network differs
  kReport,     ///< logged: it affects training
  kFree,       ///< ignored
};

enum class ValueType { kNone, kSwitch, kInteger, kNumber, kText, kIntegers, kTexts };

/// A known value that is an error, with the reason.
struct RefusedValue {
  std::string value;
  std::string reason;
};

/// Range of a number.
struct ValueRange {
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  bool without_least = false, without_most = false;
};

/// One row: everything that parsing, YAML, help, the banner and the checkpoint's args need to know about an option.
/// Created by OptionGroup (option_group.h).
struct Option {
  /// One or more values; for a flag without a field, any number.
  static constexpr int kAnyNumber = -1;

  std::string group;
  std::string flag;  // "--num-layers"
  std::vector<std::string> aliases;
  std::string name;  // Megatron's Namespace name, "num_layers"
  ValueType type = ValueType::kNone;
  std::function<ArgumentValue(const Arguments&)> read;          // null: no field, not stored in checkpoints
  std::function<bool(const ArgumentValue&, Arguments&)> write;  // false: the type does not fit
  bool switch_value = true;                                     // value that a switch stores
  int nargs = 1;                                                // number of values: 0 (a switch), a count or kAnyNumber
  std::string metavar;                                          // of its values, in the help: INT, FLOAT, DIR, FILE ...
  std::vector<std::string> choices;                             // allowed values; empty: any
  std::vector<int> choice_values;                               // matching enum values, for an enum field
  std::vector<RefusedValue> refused_values;                     // Megatron's other choices
  std::string allowed_value;  // refused options: a value without effect that is accepted
  ValueRange range;
  OnResume on_resume = OnResume::kFree;
  bool pretrain_only = false;       // infer accepts it and keeps the default
  bool from_checkpoint = false;     // --use-checkpoint-args reads it
  bool in_scheduler_state = false;  // part of Megatron's OptimizerParamScheduler.state_dict()
  std::string help;
  OptionStatus status = OptionStatus::kUsed;
  std::string reason;

  Option& alias(std::string other) { return aliases.push_back(std::move(other)), *this; }
  Option& named(std::string megatron_name) { return name = std::move(megatron_name), *this; }
  Option& one_of(std::vector<std::string> values) { return choices = std::move(values), *this; }
  Option& refuse_values(const std::vector<std::string>& values, const std::string& why);
  Option& at_least(double number) { return range.least = number, *this; }
  Option& at_most(double number) { return range.most = number, *this; }
  Option& above(double number) { return range.without_least = true, at_least(number); }
  Option& below(double number) { return range.without_most = true, at_most(number); }
  Option& shown_as(std::string values) { return metavar = std::move(values), *this; }
  Option& nargs_of(int number) { return nargs = number, *this; }
  Option& unless(std::string value) { return allowed_value = std::move(value), *this; }
  Option& turns_off() { return switch_value = false, *this; }
  Option& taken_from_checkpoint(bool taken = true) { return from_checkpoint = taken, *this; }
  /// Marks the option as stored and logged, but without effect.
  Option& no_effect(std::string why) { return status = OptionStatus::kWithoutEffect, reason = std::move(why), *this; }
  /// Marks the option as stored and logged at its default; passing it is an error.
  Option& refuse(std::string why) { return status = OptionStatus::kRefused, reason = std::move(why), *this; }

  bool is_switch() const { return nargs == 0; }
};

/// All options in the order of the help. `read` and `write` accept any Arguments.
const std::vector<Option>& option_table();
/// Finds an option by flag, alias or their snake case; `-` and `_` are equal. Null if unknown.
const Option* find_option(const std::string& spelling);
/// Finds an option by Megatron's name ("add_bias_linear"), which differs from the flag for switches that turn something
/// off. Null if unknown.
const Option* find_argument(const std::string& name);
/// All flags and aliases, for suggestions.
const std::vector<std::string>& option_spellings();
/// All names that a YAML file may contain, for suggestions.
const std::vector<std::string>& argument_names();

/// Stores the words after a flag and marks the option as given. A switch takes no word, or "true" / "false". Throws
/// UsageError for refused options and values and for wrong types, counts and choices.
void set_option(const Option& option, const std::vector<std::string>& words, Arguments& arguments);
/// As above, for a key in a YAML file, whose line is in the error. `by_name`: the key is Megatron's name, which negates
/// switches that turn something off.
void set_option(const Option& option, const YamlValue& value, Arguments& arguments, bool by_name = false);

/// Adds a message for each number outside its range.
void check_ranges(const Arguments& arguments, Mistakes& mistakes);
/// A copy with the defaults of the options that only pretrain reads.
Arguments without_training_options(const Arguments& arguments);

/// Name of an enum value, as in the flag and in Megatron's checkpoints.
std::string choice_name(const std::string& argument, int value);
template <class Enum>
std::string choice_name(const std::string& argument, Enum value) {
  return choice_name(argument, static_cast<int>(value));
}
/// Inverse of choice_name. Throws UsageError for unknown names.
int choice_value(const std::string& argument, const std::string& name);

/// (Megatron name, value) of every option with a field, for the checkpoint's args.
std::vector<std::pair<std::string, ArgumentValue>> argument_values(const Arguments& arguments);
/// Sets the option with this Megatron name, for --use-checkpoint-args. Returns false if the name is unknown or the type
/// does not fit.
bool set_argument_value(const std::string& name, const ArgumentValue& value, Arguments& arguments);

/// "positive", "from 0 to 2"; empty for unlimited ranges.
std::string range_text(const ValueRange& range);
/// "--lr FLOAT": the flag with its choices or types.
std::string option_usage(const Option& option);
/// Help: `shown` options by group with their defaults, then all options without effect and all refused ones, by reason.
std::string options_help(const std::function<bool(const Option&)>& shown);

}  // namespace megashard
