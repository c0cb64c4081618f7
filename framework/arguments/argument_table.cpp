#include "framework/arguments/argument_table.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <unordered_map>

#include "framework/arguments/argument_value.h"
#include "framework/arguments/compatibility_flags.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/option_group.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"

namespace megashard {

namespace {

std::string snake_case(std::string spelling) {
  spelling.erase(0, spelling.find_first_not_of('-'));
  std::replace(spelling.begin(), spelling.end(), '-', '_');
  return spelling;
}

std::vector<Option> build_table() {
  std::vector<Option> rows;
  detail::add_model_options(rows);
  detail::add_network_options(rows);
  detail::add_expert_options(rows);
  detail::add_training_options(rows);
  detail::add_activation_options(rows);
  detail::add_optimizer_options(rows);
  detail::add_logging_options(rows);
  detail::add_parallel_options(rows);
  detail::add_checkpoint_options(rows);
  detail::add_data_options(rows);
  detail::add_compatibility_flags(rows);
  detail::add_refused_flags(rows);
  return rows;
}

std::unordered_map<std::string, const Option*> build_index() {
  std::unordered_map<std::string, const Option*> index;
  for (const auto& option : option_table()) {
    if (option.flag.empty()) continue;
    index.emplace(snake_case(option.flag), &option);
    for (const auto& other : option.aliases) index.emplace(snake_case(other), &option);
  }
  return index;
}

[[noreturn]] void wrong_type(const Option& option, const std::string& expected, const std::string& word) {
  throw UsageError(option.flag + " takes " + expected + ", got \"" + word + "\".");
}

int64_t integer(const Option& option, const std::string& word) {
  if (const auto whole = parse_integer(word)) return *whole;
  const bool too_large = !word.empty() && word.find_first_not_of("+-0123456789") == word.npos;
  wrong_type(option, too_large ? "a whole number within range" : "a whole number", word);
}

double number(const Option& option, const std::string& word) {
  const auto number = parse_number(word);
  if (!number) wrong_type(option, "a number", word);
  return *number;
}

ArgumentValue parse_words(const Option& option, const std::vector<std::string>& words) {
  switch (option.type) {
    case ValueType::kNone:
      return {};
    case ValueType::kSwitch:
      if (words.front() != "true" && words.front() != "false") {
        wrong_type(option, "no value (or true / false)", words.front());
      }
      // A switch set to false explicitly keeps the field's default.
      return (words.front() == "true") == option.switch_value;
    case ValueType::kInteger:
      return integer(option, words.front());
    case ValueType::kNumber:
      return number(option, words.front());
    case ValueType::kText:
      return words.front();
    case ValueType::kIntegers: {
      std::vector<int64_t> values;
      for (const auto& word : words) values.push_back(integer(option, word));
      return values;
    }
    case ValueType::kTexts:
      return words;
  }
  return {};
}

void check_count(const Option& option, const std::vector<std::string>& words) {
  const auto count = static_cast<int>(words.size());
  const bool any = option.nargs == Option::kAnyNumber;
  const bool is_list = option.type == ValueType::kIntegers || option.type == ValueType::kTexts;
  const bool one_of_many = any && !is_list && option.status == OptionStatus::kUsed;  // Megatron accepts a list
  if (one_of_many && count > 1)
    throw UsageError(option.flag + " takes one value here, got " + std::to_string(count) + ".");
  if (any && (count > 0 || option.status == OptionStatus::kWithoutEffect)) return;
  if (count == 0) throw UsageError(option.flag + " has no value; write " + option_usage(option) + ".");
  if (count == option.nargs) return;
  throw UsageError(option.flag + " takes " +
                   (option.nargs == 1 ? "one value" : std::to_string(option.nargs) + " values") + ", got " +
                   std::to_string(count) + ".");
}

void check_word(const Option& option, const std::string& word) {
  if (word.empty() && option.status == OptionStatus::kUsed) {
    throw UsageError(option.flag + " has an empty value; is a variable of the script unset? Write " +
                     option_usage(option) + ".");
  }
  for (const auto& refused : option.refused_values) {
    if (refused.value == word) throw UsageError(option.flag + " " + word + " is refused: " + refused.reason + ".");
  }
  const auto& choices = option.choices;
  if (choices.empty() || std::find(choices.begin(), choices.end(), word) != choices.end()) return;
  const std::string suggestion = did_you_mean(word, choices);
  throw UsageError(option.flag + " takes " + (choices.size() == 1 ? "only " : "one of ") + c10::Join(", ", choices) +
                   ", got \"" + word + "\"" + suggestion + (suggestion.empty() ? "." : ""));
}

/// Compares numbers by value: 0 equals 0.0.
bool is_allowed(const Option& option, const std::vector<std::string>& words) {
  const auto allowed = parse_number(option.allowed_value);
  return !option.allowed_value.empty() && !words.empty() &&
         std::all_of(words.begin(), words.end(), [&](const std::string& word) {
           return word == option.allowed_value || (allowed && parse_number(word) == allowed);
         });
}

bool is_within(const ValueRange& range, double value) {
  return (range.without_least ? value > range.least : value >= range.least) &&
         (range.without_most ? value < range.most : value <= range.most);
}

const Option& choice_row(const std::string& argument) {
  const Option* option = find_argument(argument);
  TORCH_CHECK(option != nullptr && !option->choice_values.empty(), argument, " is no argument of named values");
  return *option;
}

}  // namespace

const std::vector<Option>& option_table() {
  static const std::vector<Option> rows = build_table();
  return rows;
}

const Option* find_option(const std::string& spelling) {
  static const auto index = build_index();
  const auto key = snake_case(spelling);
  const auto found = index.find(key);
  return found == index.end() ? nullptr : found->second;
}

const Option* find_argument(const std::string& name) {
  for (const auto& option : option_table()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

const std::vector<std::string>& option_spellings() {
  static const auto all = [] {
    std::vector<std::string> spellings;
    for (const auto& option : option_table()) {
      if (option.flag.empty()) continue;
      spellings.push_back(option.flag);
      spellings.insert(spellings.end(), option.aliases.begin(), option.aliases.end());
    }
    return spellings;
  }();
  return all;
}

const std::vector<std::string>& argument_names() {
  static const auto all = [] {
    std::vector<std::string> names;
    for (const auto& option : option_table()) {
      if (option.status == OptionStatus::kComputed) continue;
      names.push_back(option.name);
      const auto of_flag = snake_case(option.flag);
      if (of_flag != option.name) names.push_back(of_flag);
    }
    return names;
  }();
  return all;
}

void set_option(const Option& option, const std::vector<std::string>& words, Arguments& arguments) {
  const bool off = option.is_switch() && words.size() == 1 && words.front() == "false";
  if (option.status == OptionStatus::kRefused) {
    if (off || is_allowed(option, words)) return;
    throw UsageError(option.flag + " is refused: " + option.reason + ".");
  }
  if (!option.is_switch()) {
    check_count(option, words);
    for (const auto& word : words) check_word(option, word);
  }
  if (option.write) {
    const bool alone = option.is_switch() && words.empty();
    option.write(parse_words(option, alone ? std::vector<std::string>{"true"} : words), arguments);
  }
  if (option.status == OptionStatus::kUsed) arguments.given[option.name] = "command line";
  if (option.status == OptionStatus::kWithoutEffect && !off) arguments.given_without_effect.insert(option.flag);
}

void set_option(const Option& option, const YamlValue& value, Arguments& arguments, bool by_name) {
  std::vector<std::string> words;
  if (option.is_switch()) {
    words = {value.boolean() == (by_name ? option.switch_value : true) ? "true" : "false"};
  } else {
    words = value.words();
  }
  try {
    set_option(option, words, arguments);
    if (const auto given = arguments.given.find(option.name); given != arguments.given.end())
      given->second = c10::str(value.source, ":", value.node.Mark().line + 1);
  } catch (const UsageError& error) {
    const bool is_flag = find_option(value.key) == &option || option.name == value.key;  // the error names the flag
    throw UsageError(yaml_place(value.source, value.node) + (is_flag ? "" : value.key + ": ") + error.what());
  }
}

std::string range_text(const ValueRange& range) {
  const std::string least = c10::str(range.least), most = c10::str(range.most);
  if (range.most == ValueRange().most) {
    if (range.least == ValueRange().least) return "";
    if (range.least == 0) return range.without_least ? "positive" : "not negative";
    return (range.without_least ? "above " : "at least ") + least;
  }
  if (range.without_least) return "above " + least + (range.without_most ? " and below " : " and at most ") + most;
  return "from " + least + (range.without_most ? " to below " : " to ") + most;
}

void check_ranges(const Arguments& arguments, Mistakes& mistakes) {
  for (const auto& option : option_table()) {
    if (!option.read) continue;
    const auto value = option.read(arguments);
    const auto number = number_of(value);
    if (!number || is_within(option.range, *number)) continue;
    mistakes.add(option.flag + " is " + argument_text(value) + "; it must be " + range_text(option.range) + ".",
                 {option.flag});
  }
}

Arguments without_training_options(const Arguments& arguments) {
  const Arguments defaults;
  Arguments others = arguments;
  for (const auto& option : option_table()) {
    if (option.pretrain_only && option.read) option.write(option.read(defaults), others);
  }
  return others;
}

std::string choice_name(const std::string& argument, int value) {
  const Option& option = choice_row(argument);
  const auto& values = option.choice_values;
  const auto found = std::find(values.begin(), values.end(), value);
  TORCH_CHECK(found != values.end(), argument, " has no value of number ", value);
  return option.choices[static_cast<size_t>(found - values.begin())];
}

int choice_value(const std::string& argument, const std::string& name) {
  const Option& option = choice_row(argument);
  check_word(option, name);
  const auto found = std::find(option.choices.begin(), option.choices.end(), name);
  return option.choice_values[static_cast<size_t>(found - option.choices.begin())];
}

std::vector<std::pair<std::string, ArgumentValue>> argument_values(const Arguments& arguments) {
  std::vector<std::pair<std::string, ArgumentValue>> values;
  for (const auto& option : option_table()) {
    if (option.read) values.emplace_back(option.name, option.read(arguments));
  }
  return values;
}

bool set_argument_value(const std::string& name, const ArgumentValue& value, Arguments& arguments) {
  const Option* option = find_argument(name);
  return option != nullptr && option->write && option->write(value, arguments);
}

Option& Option::refuse_values(const std::vector<std::string>& values, const std::string& why) {
  for (const auto& value : values) refused_values.push_back({value, why});
  return *this;
}

namespace detail {

Option& OptionGroup::row(std::string flag, ValueType type) {
  Option option;
  option.group = title_;
  option.name = snake_case(flag);
  option.flag = std::move(flag);
  option.type = type;
  const bool list = type == ValueType::kIntegers || type == ValueType::kTexts;
  option.nargs = list ? Option::kAnyNumber : type == ValueType::kSwitch ? 0 : 1;
  if (type == ValueType::kInteger || type == ValueType::kIntegers) option.metavar = "INT";
  if (type == ValueType::kNumber) option.metavar = "FLOAT";
  option.pretrain_only = defaults_.pretrain_only;
  option.from_checkpoint = defaults_.from_checkpoint;
  option.in_scheduler_state = defaults_.in_scheduler_state;
  return rows_.emplace_back(std::move(option));
}

}  // namespace detail

}  // namespace megashard
