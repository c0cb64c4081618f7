#pragma once

#include <functional>
#include <string>
#include <vector>

#include "framework/arguments/arguments.h"
#include "framework/arguments/yaml_value.h"

namespace megashard {

/// What a reader has made of one key of a configuration file.
struct KeyNote {
  enum class Use { kRead, kIgnored, kRefused };

  std::string source{};  ///< the file
  int line = 0;
  std::string key{};  ///< with those around it
  Use use = Use::kRead;
  std::string text{};  ///< what it is read as, or why it is not read
};

/// Of a file's keys, in its order; readers take a pointer, which is null where nobody asks.
using KeyLog = std::vector<KeyNote>;

/// Reads a key by `take`, and notes the arguments that this has set. What it throws is noted too, and thrown on.
void take_key(KeyLog* log, const YamlValue& value, const Arguments& arguments, const std::function<void()>& take);
/// The same of a key that is no argument: it is noted as written.
void take_key(KeyLog* log, const YamlValue& value, const std::function<void()>& take);
/// Notes a key that nothing reads.
void leave_key(KeyLog* log, const YamlValue& value, const std::string& why);

}  // namespace megashard
