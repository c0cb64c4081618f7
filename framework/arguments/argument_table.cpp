#include "framework/arguments/argument_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>
#include <unordered_map>

#include "framework/arguments/nearest_name.h"
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
  detail::add_training_options(rows);
  detail::add_run_options(rows);
  detail::add_foreign_options(rows);
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

template <class T>
T parse_number(const Option& option, const std::string& word, const std::string& expected) {
  T value{};
  const char* begin = word.data() + (word.starts_with('+') ? 1 : 0);
  const char* end = word.data() + word.size();
  const auto result = std::from_chars(begin, end, value);
  if (result.ec == std::errc::result_out_of_range) wrong_type(option, expected + " within range", word);
  bool is_number = result.ec == std::errc() && result.ptr == end;
  if constexpr (std::is_floating_point_v<T>) is_number &= !std::isnan(value);
  if (!is_number) wrong_type(option, expected, word);
  return value;
}

struct StoreWords {
  const Option& option;
  const std::vector<std::string>& words;
  Arguments& arguments;

  void operator()(std::monostate) const {}
  void operator()(bool Arguments::*member) const {
    const std::string& word = words.front();
    if (word != "true" && word != "false") wrong_type(option, "no value (or true / false)", word);
    // A switch that is spelt out as false leaves the field at its default.
    arguments.*member = (word == "true") == option.switch_value;
  }
  void operator()(int64_t Arguments::*member) const { arguments.*member = integer(words.front()); }
  void operator()(double Arguments::*member) const { arguments.*member = number(words.front()); }
  void operator()(std::string Arguments::*member) const { arguments.*member = words.front(); }
  void operator()(std::optional<int64_t> Arguments::*member) const { arguments.*member = integer(words.front()); }
  void operator()(std::optional<double> Arguments::*member) const { arguments.*member = number(words.front()); }
  void operator()(std::optional<std::string> Arguments::*member) const { arguments.*member = words.front(); }
  void operator()(std::vector<int64_t> Arguments::*member) const {
    std::vector<int64_t> values;
    for (const auto& word : words) values.push_back(integer(word));
    arguments.*member = std::move(values);
  }
  void operator()(std::vector<std::string> Arguments::*member) const { arguments.*member = words; }

  int64_t integer(const std::string& word) const { return parse_number<int64_t>(option, word, "a whole number"); }
  double number(const std::string& word) const { return parse_number<double>(option, word, "a number"); }
};

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

void check_count(const Option& option, const std::vector<std::string>& words) {
  const auto count = static_cast<int>(words.size());
  const bool any = option.words == Option::kAnyNumber;
  const bool foreign = option.status == OptionStatus::kWithoutEffect;
  if (any && (count > 0 || foreign)) return;
  if (count == 0) throw UsageError(option.flag + " has no value; write " + option_usage(option) + ".");
  if (count == option.words) return;
  throw UsageError(option.flag + " takes " +
                   (option.words == 1 ? "one value" : std::to_string(option.words) + " values") + ", got " +
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
  throw UsageError(option.flag + " takes " + (choices.size() == 1 ? "only " : "one of ") + joined(choices, ", ") +
                   ", got \"" + word + "\"" + suggestion + (suggestion.empty() ? "." : ""));
}

std::optional<double> number_in(const std::string& word) {
  double value = 0;
  const char* end = word.data() + word.size();
  const auto result = std::from_chars(word.data(), end, value);
  return result.ec == std::errc() && result.ptr == end ? std::optional(value) : std::nullopt;
}

/// Numbers count as such: 0 is 0.0.
bool is_neutral(const Option& option, const std::vector<std::string>& words) {
  const auto number = number_in(option.neutral);
  return !option.neutral.empty() && !words.empty() &&
         std::all_of(words.begin(), words.end(), [&](const std::string& word) {
           return word == option.neutral || (number && number_in(word) == number);
         });
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
  const bool neutral = is_neutral(option, words);
  const bool off = option.is_switch() && words.size() == 1 && words.front() == "false";
  if (option.status == OptionStatus::kRefused) {
    if (neutral || off) return;
    throw UsageError(option.flag + " is refused: " + option.reason + ".");
  }
  if (!option.is_switch()) {
    check_count(option, words);
    for (const auto& word : words) check_word(option, word);
    std::visit(StoreWords{option, words, arguments}, option.field);
  } else {
    const std::vector<std::string> on = words.empty() ? std::vector<std::string>{"true"} : words;
    std::visit(StoreWords{option, on, arguments}, option.field);
  }
  if (option.status == OptionStatus::kUsed) arguments.given.insert(option.name);
  if (option.status == OptionStatus::kWithoutEffect && !off) arguments.given_without_effect.insert(option.flag);
}

namespace detail {

Option& OptionGroup::row(std::string flag, int words) {
  Option option;
  option.group = title_;
  option.name = snake_case(flag);
  option.flag = std::move(flag);
  option.words = words;
  return rows_.emplace_back(std::move(option));
}

Option& OptionGroup::add(std::string flag, ArgumentField field, std::string help) {
  int words = 1;
  if (std::holds_alternative<bool Arguments::*>(field)) words = 0;
  if (std::holds_alternative<std::vector<int64_t> Arguments::*>(field) ||
      std::holds_alternative<std::vector<std::string> Arguments::*>(field)) {
    words = Option::kAnyNumber;
  }
  Option& option = row(std::move(flag), words);
  const bool whole = std::holds_alternative<int64_t Arguments::*>(field) ||
                     std::holds_alternative<std::optional<int64_t> Arguments::*>(field) ||
                     std::holds_alternative<std::vector<int64_t> Arguments::*>(field);
  const bool number = std::holds_alternative<double Arguments::*>(field) ||
                      std::holds_alternative<std::optional<double> Arguments::*>(field);
  option.kind = whole ? "INT" : number ? "FLOAT" : "";
  option.field = field;
  option.help = std::move(help);
  return option;
}

Option& OptionGroup::computed(std::string name, ArgumentField field) {
  Option& option = row("", 1);
  option.name = std::move(name);
  option.field = field;
  option.status = OptionStatus::kComputed;
  return option;
}

Option& OptionGroup::without_effect(std::string flag, int words, std::string reason) {
  Option& option = row(std::move(flag), words);
  option.status = OptionStatus::kWithoutEffect;
  option.reason = std::move(reason);
  return option;
}

Option& OptionGroup::refused(std::string flag, int words, std::string reason) {
  Option& option = row(std::move(flag), words);
  option.status = OptionStatus::kRefused;
  option.reason = std::move(reason);
  return option;
}

}  // namespace detail

}  // namespace megashard
