#include "framework/arguments/key_log.h"

#include <c10/util/StringUtil.h>

#include "framework/arguments/argument_table.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

KeyNote note_of(const YamlValue& value, KeyNote::Use use, std::string text) {
  return {value.source, value.node.Mark().line + 1, value.key, use, std::move(text)};
}

/// A note of the error without its place, which the note has.
KeyNote refusal_of(const YamlValue& value, const UsageError& error) {
  std::string text = error.what();
  if (const auto place = yaml_place(value.source, value.node); text.starts_with(place)) text.erase(0, place.size());
  return note_of(value, KeyNote::Use::kRefused, std::move(text));
}

std::string as_written(const YAML::Node& node) {
  if (node.IsNull()) return "null";
  YAML::Emitter line;
  line << YAML::Flow << node;
  return line.c_str();
}

/// "--lr 1e-05 --seed 3": options that were given or changed.
std::string changes(const Arguments& before, const Arguments& after) {
  std::vector<std::string> flags;
  for (const auto& option : option_table()) {
    if (!option.read || option.flag.empty()) continue;
    const auto value = option.read(after);
    const bool given = after.is_given(option.name) && !before.is_given(option.name);
    if (!given && value == option.read(before)) continue;
    flags.push_back(option.flag + " " + argument_text(value));
  }
  return c10::Join(" ", flags);
}

}  // namespace

void take_key(KeyLog* log, const YamlValue& value, const Arguments& arguments, const std::function<void()>& take) {
  if (log == nullptr) return take();
  const Arguments before = arguments;
  take_key(log, value, take);
  if (log->back().use != KeyNote::Use::kRead) return;
  if (const auto flags = changes(before, arguments); !flags.empty()) log->back().text = flags;
}

void take_key(KeyLog* log, const YamlValue& value, const std::function<void()>& take) {
  if (log == nullptr) return take();
  try {
    take();
    log->push_back(note_of(value, KeyNote::Use::kRead, as_written(value.node)));
  } catch (const UsageError& error) {
    log->push_back(refusal_of(value, error));
    throw;
  }
}

void leave_key(KeyLog* log, const YamlValue& value, const std::string& why) {
  if (log != nullptr) log->push_back(note_of(value, KeyNote::Use::kIgnored, why));
}

}  // namespace megashard
