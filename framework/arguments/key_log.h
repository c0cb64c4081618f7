#pragma once

#include <functional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/yaml_value.h"

namespace megashard {

/// What a reader did with one key of a configuration file.
struct KeyNote {
  enum class Use { kRead, kIgnored, kRefused };

  std::string source{};  ///< file name
  int line = 0;
  std::string key{};  ///< including its parents
  Use use = Use::kRead;
  std::string text{};  ///< the setting it became, or why it is not read
};

/// Notes for a file's keys, in order. Readers take a pointer, which is null if no log is wanted.
using KeyLog = std::vector<KeyNote>;

/// Reads a key with `take` and logs the arguments that it set. Errors are logged and rethrown.
void take_key(KeyLog* log, const YamlValue& value, const Arguments& arguments, const std::function<void()>& take);
/// As above, for a key that is not an argument: logged as written.
void take_key(KeyLog* log, const YamlValue& value, const std::function<void()>& take);
/// Logs a key that is not read.
void leave_key(KeyLog* log, const YamlValue& value, const std::string& why);

}  // namespace megashard
