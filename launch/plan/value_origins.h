#pragma once

#include <map>
#include <string>

#include "framework/arguments/argument_value.h"
#include "launch/arguments/command_line.h"

namespace megashard {

/// Where the value of each argument comes from, followed while a run makes its arguments out of a command line, files,
/// a checkpoint and each other.
class ValueOrigins {
 public:
  /// Of a line that was just read.
  explicit ValueOrigins(const CommandLine& line);

  /// What has changed since the last call comes from `origin`.
  void note_changes(const Arguments& arguments, const std::string& origin);
  /// "command line", "run.yaml:12", "default"; by Megatron's name of the argument.
  const std::string& of(const std::string& name) const { return values_.at(name).origin; }

 private:
  struct Known {
    ArgumentValue value;
    std::string origin;
  };
  std::map<std::string, Known> values_;
};

}  // namespace megashard
