#include "launch/arguments/argument_file.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <sstream>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_value.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_value.h"
#include "framework/diagnostics.h"
#include "launch/arguments/foreign_flags.h"
#include "launch/roll/roll_keys.h"

namespace megashard {

namespace {

constexpr const char* kSection = "gpt_args";
constexpr const char* kLoraSection = "lora_args";

/// Options of one file; records where each was given.
class OptionFile {
 public:
  OptionFile(const std::string& path, Arguments& arguments, Mistakes& mistakes, KeyLog* log)
      : path_(path), arguments_(arguments), mistakes_(mistakes), log_(log) {}

  /// Also accepts Megatron's name of a switch that turns something off, which negates its flag.
  void store(const YAML::Node& key, const YAML::Node& value) {
    const std::string name = key.IsScalar() ? key.Scalar() : "";
    const Option* option = find_option(name);
    const bool by_name = option == nullptr;
    if (by_name) option = find_argument(name);
    if (option == nullptr || option->status == OptionStatus::kComputed) return unknown(key, name);
    const auto [first, is_new] = lines_.try_emplace(option, name, key.Mark().line + 1);
    const YamlValue each{path_, name, value};
    if (!is_new) {
      refuse(key, name,
             yaml_place(path_, key) + name + " and " + first->second.first + " in line " +
                 std::to_string(first->second.second) + " mean the same; keep one.",
             {option->flag});
      return;
    }
    if (value.IsNull()) return leave_key(log_, each, "it has no value");
    mistakes_.attempt([&] { take(*option, each, by_name); }, {option->flag});
  }

  /// Stores MindSpeed-MM's section beside gpt_args.
  void store_lora(const YAML::Node& section) {
    const std::vector<std::string> keys = {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
                                           "lora_register_forward_hook"};  // not needed for inputs
    for (const auto& item : section) {
      const auto name = item.first.Scalar();
      if (std::find(keys.begin(), keys.end(), name) == keys.end()) {
        const auto inside = std::string(kLoraSection) + "." + name;
        refuse(item.first, inside, unknown_key(yaml_place(path_, item.first), inside, keys), {});
      } else if (name != keys.back()) {
        store(item.first, item.second);
      } else {
        leave_key(log_, {path_, name, item.second}, "inputs need no gradient for it");
      }
    }
    arguments_.lora_target_modules = comma_words(arguments_.lora_target_modules);
  }

  /// Skips other sections of MindSpeed-MM's files: data and model, which launch/mindspeed reads, and anchors.
  void leave_section(const YAML::Node& key, const YAML::Node& value) {
    const auto name = key.Scalar();
    if (value.IsMap() && (name == "data" || name == "model")) return;
    arguments_.unread_sections.insert(name);
    const bool known = find_option(name) != nullptr || find_argument(name) != nullptr;
    if (!known || value.IsMap())
      return leave_key(log_, {path_, name, value}, std::string("it stands beside ") + kSection);
    refuse(key, name,
           yaml_place(path_, key) + "\"" + name + "\" stands beside " + kSection +
               ":, which holds all options; move it there or remove it.",
           {});
  }

 private:
  void take(const Option& option, const YamlValue& value, bool by_name) {
    const auto set = [&] { set_option(option, value, arguments_, by_name); };
    if (option.status != OptionStatus::kWithoutEffect) return take_key(log_, value, arguments_, set);
    set();
    leave_key(log_, value, option.reason);
  }

  void unknown(const YAML::Node& key, const std::string& name) {
    if (const auto here = name_here(name)) {
      refuse(key, name, yaml_place(path_, key) + "unknown key \"" + name + "\"; " + here->text + ".", here->flags);
      return;
    }
    const auto nearest = nearest_name(name, argument_names());
    refuse(key, name, unknown_key(yaml_place(path_, key), name, argument_names(), "."),
           nearest ? std::vector{flag_of(*nearest)} : std::vector<std::string>{});
  }

  void refuse(const YAML::Node& key, const std::string& name, const std::string& message,
              const std::vector<std::string>& flags) {
    mistakes_.attempt([&] { take_key(log_, {path_, name, key}, [&] { throw UsageError(message); }); }, flags);
  }

  static std::string flag_of(const std::string& name) {
    const Option* option = find_option(name);
    return (option == nullptr ? find_argument(name) : option)->flag;
  }

  const std::string& path_;
  Arguments& arguments_;
  Mistakes& mistakes_;
  KeyLog* log_;
  std::map<const Option*, std::pair<std::string, int>> lines_;  // name as spelled in the file
};

}  // namespace

void read_argument_file(const std::string& path, Arguments& arguments, Mistakes& mistakes, KeyLog* log) {
  parse_argument_file(read_configuration(path, "the argument file"), path, arguments, mistakes, log);
}

void parse_argument_file(const std::string& text, const std::string& path, Arguments& arguments, Mistakes& mistakes,
                         KeyLog* log) {
  const YAML::Node root = load_yaml(text, path);
  const auto fail = [&path] {
    throw UsageError(path + ": the file must hold `key: value` lines, at the top or under " + kSection + ":.");
  };
  if (!root.IsMap()) fail();
  if (is_roll_configuration(root)) {
    throw UsageError(path + " is a configuration of ROLL; name the worker to run by --role.");
  }
  const bool has_section = root[kSection].IsDefined();
  const YAML::Node options = has_section ? root[kSection] : root;
  if (!options.IsMap()) fail();
  OptionFile reader(path, arguments, mistakes, log);
  for (const auto& item : options) reader.store(item.first, item.second);
  if (!has_section) return;
  for (const auto& item : root) {
    const auto name = item.first.Scalar();
    if (name == kLoraSection && item.second.IsMap()) {
      reader.store_lora(item.second);
    } else if (name != kSection) {
      reader.leave_section(item.first, item.second);
    }
  }
}

std::vector<std::string> read_words(const std::string& path, const std::string& flag) {
  std::istringstream text(read_configuration(path, flag));
  return {std::istream_iterator<std::string>(text), {}};
}

}  // namespace megashard
