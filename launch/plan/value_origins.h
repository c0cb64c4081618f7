#pragma once

#include <map>
#include <string>

#include "framework/arguments/argument_value.h"
#include "launch/arguments/command_line.h"

namespace megashard {

/// Tracks the origin of each argument's value while a run derives its arguments from the command line, files, a
/// checkpoint and each other.
class ValueOrigins {
 public:
  /// For a command line that has just been parsed.
  explicit ValueOrigins(const CommandLine& line);

  /// Sets the origin of all values that changed since the last call.
  void note_changes(const Arguments& arguments, const std::string& origin);
  /// "command line", "run.yaml:12", "default"; `name` is Megatron's name of the argument.
  const std::string& of(const std::string& name) const { return values_.at(name).origin; }

 private:
  struct Known {
    ArgumentValue value;
    std::string origin;
  };
  std::map<std::string, Known> values_;
};

}  // namespace megashard
