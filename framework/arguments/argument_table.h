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
  kWithoutEffect,  ///< accepted, changes nothing here; `reason` says why that is right
  kRefused,        ///< known, and an error with `reason`
  kComputed,       ///< no flag: computed by the program, printed and stored
};

/// What a resume does about a value that differs from the checkpoint's.
enum class OnResume {
  kMustMatch,  ///< refuses it: it is of another network
  kReport,     ///< goes on and says so: it steers what is learnt
  kFree,       ///< goes on
};

enum class ValueType { kNone, kSwitch, kInteger, kNumber, kText, kIntegers, kTexts };

/// A value that is known and an error, with the reason.
struct RefusedValue {
  std::string value;
  std::string reason;
};

/// The numbers that a field may hold.
struct ValueRange {
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  bool without_least = false, without_most = false;
};

/// One row: everything that parsing, YAML, help, the banner and the checkpoint's args know about an
/// option. OptionGroup (option_group.h) makes them.
struct Option {
  /// At least one; of a flag without a field, none or more.
  static constexpr int kAnyNumber = -1;

  std::string group;
  std::string flag;  // "--num-layers"
  std::vector<std::string> aliases;
  std::string name;  // Megatron's Namespace name, "num_layers"
  ValueType type = ValueType::kNone;
  std::function<ArgumentValue(const Arguments&)> read;          // null: no field, nothing that a checkpoint keeps
  std::function<bool(const ArgumentValue&, Arguments&)> write;  // false: the type does not fit
  bool switch_value = true;                                     // what a switch stores
  int nargs = 1;                             // values that follow: 0 (a switch), a count or kAnyNumber
  std::string metavar;                       // of its values, for the help: INT, FLOAT, DIR, FILE ...
  std::vector<std::string> choices;          // allowed values; empty: any
  std::vector<int> choice_values;            // those of the enum, when the field is one
  std::vector<RefusedValue> refused_values;  // Megatron's other choices
  std::string allowed_value;                 // refused options only: a value that changes nothing and is let through
  ValueRange range;
  OnResume on_resume = OnResume::kFree;
  bool pretrain_only = false;       // infer accepts it and leaves it at its default
  bool from_checkpoint = false;     // --use-checkpoint-args takes it
  bool in_scheduler_state = false;  // Megatron's OptimizerParamScheduler.state_dict() has it
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
  /// Stored and printed, but changes nothing.
  Option& no_effect(std::string why) { return status = OptionStatus::kWithoutEffect, reason = std::move(why), *this; }
  /// Stored and printed at its default; giving it is an error.
  Option& refuse(std::string why) { return status = OptionStatus::kRefused, reason = std::move(why), *this; }

  bool is_switch() const { return nargs == 0; }
};

/// Every option in the order of the help. `read` and `write` fit any Arguments.
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

/// Stores the words that followed a flag and marks the option as given. A switch takes no word, or
/// "true" / "false". Throws UsageError for refused options and values, wrong types, counts and
/// choices.
void set_option(const Option& option, const std::vector<std::string>& words, Arguments& arguments);
/// The same of a key in a YAML file, whose place stands in the error. `by_name`: the key is Megatron's name, which
/// states the opposite of a switch that turns something off.
void set_option(const Option& option, const YamlValue& value, Arguments& arguments, bool by_name = false);

/// A message for each number that is out of its row's range.
void check_ranges(const Arguments& arguments, Mistakes& mistakes);
/// Sets what only pretrain reads to its default.
void reset_training_options(Arguments& arguments);

/// The name of an enum's value, as the flag and Megatron's checkpoints spell it.
std::string choice_name(const std::string& argument, int value);
template <class Enum>
std::string choice_name(const std::string& argument, Enum value) {
  return choice_name(argument, static_cast<int>(value));
}
/// The inverse. Throws UsageError for names that are none.
int choice_value(const std::string& argument, const std::string& name);

/// (Megatron name, value) of every option with a field: the checkpoint's args.
std::vector<std::pair<std::string, ArgumentValue>> argument_values(const Arguments& arguments);
/// The inverse for one name, for --use-checkpoint-args; false when the name is unknown or the type
/// does not fit.
bool set_argument_value(const std::string& name, const ArgumentValue& value, Arguments& arguments);

/// "positive", "from 0 to 2"; empty: any number.
std::string range_text(const ValueRange& range);
/// "--lr FLOAT": the flag with its choices or the kinds of its values.
std::string option_usage(const Option& option);
/// Options that are `shown`, by group with their defaults; then all that are accepted without
/// effect and all that are refused, by their reasons.
std::string options_help(const std::function<bool(const Option&)>& shown);

}  // namespace megashard
