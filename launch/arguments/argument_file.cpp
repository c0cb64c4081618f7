#include "launch/arguments/argument_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_text.h"
#include "framework/diagnostics.h"
#include "launch/arguments/comma_words.h"
#include "launch/roll/roll_keys.h"

namespace megashard {

namespace {

constexpr const char* kSection = "gpt_args";
constexpr const char* kLoraSection = "lora_args";

std::string where(const std::string& path, const YAML::Node& node) {
  return path + ":" + std::to_string(node.Mark().line + 1) + ": ";
}

std::vector<std::string> yaml_words(const YAML::Node& value, const std::string& place) {
  std::vector<std::string> words;
  if (value.IsScalar()) return {value.Scalar()};
  if (!value.IsSequence()) throw UsageError(place + " takes a value or a list, got a map.");
  for (const auto& item : value) {
    if (!item.IsScalar()) throw UsageError(place + " takes a list of plain values.");
    words.push_back(item.Scalar());
  }
  return words;
}

/// `name` counts too: Megatron's name of a switch that turns something off states the opposite of
/// its flag.
void store(const std::string& path, const YAML::Node& key, const YAML::Node& value,
           Arguments& arguments) {
  const std::string name = key.Scalar(), place = where(path, key) + name;
  const Option* option = find_option(name);
  const bool by_name = option == nullptr;
  if (by_name) option = find_argument(name);
  if (option == nullptr || option->status == OptionStatus::kComputed) {
    const auto suggestion = did_you_mean(name, argument_names());
    throw UsageError(where(path, key) + "unknown key \"" + name + "\"" +
                     (suggestion.empty() ? "." : suggestion));
  }
  if (value.IsNull()) return;
  auto words = yaml_words(value, place);
  if (option->is_switch()) {
    bool on = false;
    if (!YAML::convert<bool>::decode(value, on)) throw UsageError(place + " takes true or false.");
    words = {on == (by_name ? option->switch_value : true) ? "true" : "false"};
  }
  try {
    set_option(*option, words, arguments);
  } catch (const UsageError& error) {
    throw UsageError(where(path, key) + error.what());
  }
}

/// MindSpeed-MM's section beside gpt_args.
void store_lora(const std::string& path, const YAML::Node& section, Arguments& arguments) {
  const std::vector<std::string> keys = {"lora_r", "lora_alpha", "lora_dropout",
                                         "lora_target_modules",
                                         "lora_register_forward_hook"};  // frozen inputs need none
  for (const auto& item : section) {
    const auto name = item.first.Scalar();
    if (std::find(keys.begin(), keys.end(), name) == keys.end()) {
      const auto hint = did_you_mean(name, keys);
      throw UsageError(where(path, item.first) + "unknown key " + kLoraSection + "." + name +
                       (hint.empty() ? "; remove it." : hint));
    }
    if (name != keys.back()) store(path, item.first, item.second, arguments);
  }
  arguments.lora_target_modules = comma_words(arguments.lora_target_modules);
}

}  // namespace

std::string read_named_file(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  if (!file) throw UsageError(name + " " + path + " cannot be read; check the path.");
  if (std::filesystem::is_directory(path))
    throw UsageError(name + " " + path + " cannot be read; it is a folder.");
  return {std::istreambuf_iterator<char>(file), {}};
}

void read_argument_file(const std::string& path, Arguments& arguments) {
  parse_argument_file(read_named_file(path, "the argument file"), path, arguments);
}

void parse_argument_file(const std::string& text, const std::string& path, Arguments& arguments) {
  const YAML::Node root = load_yaml(text, path);
  const auto fail = [&path] {
    throw UsageError(path + ": the file must hold `key: value` lines, at the top or under " +
                     kSection + ":.");
  };
  if (!root.IsMap()) fail();
  if (is_roll_configuration(root)) {
    throw UsageError(path + " is a configuration of ROLL; name the worker to run by --role.");
  }
  const bool has_section = root[kSection].IsDefined();
  const YAML::Node options = has_section ? root[kSection] : root;
  if (!options.IsMap()) fail();
  if (has_section && root.size() > 1) {
    for (const auto& item : root) {
      const auto name = item.first.Scalar();
      if (name == kSection) continue;
      if (name == kLoraSection && item.second.IsMap()) {
        store_lora(path, item.second, arguments);
        continue;
      }
      // data, model and anchors of MindSpeed-MM's files.
      arguments.unread_sections.insert(name);
      const bool known = find_option(name) != nullptr || find_argument(name) != nullptr;
      if (!known || item.second.IsMap()) continue;
      throw UsageError(where(path, item.first) + "\"" + name + "\" stands beside " + kSection +
                       ":, which holds all options; move it there or remove it.");
    }
  }
  for (const auto& item : options) store(path, item.first, item.second, arguments);
}

std::vector<std::string> read_words(const std::string& path, const std::string& flag) {
  std::ifstream file(path);
  if (!file) throw UsageError(flag + " " + path + " cannot be read; check the path.");
  std::vector<std::string> words{std::istream_iterator<std::string>(file), {}};
  if (words.empty())
    throw UsageError(flag + " " + path + " holds no words; it replaces --data-path.");
  return words;
}

}  // namespace megashard
