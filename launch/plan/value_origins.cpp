#include "launch/plan/value_origins.h"

#include "framework/arguments/argument_table.h"

namespace megashard {

ValueOrigins::ValueOrigins(const CommandLine& line) {
  for (auto& [name, value] : argument_values(Arguments())) values_[name] = {std::move(value), "default"};
  note_changes(line.arguments, line.worker      ? "worker " + line.worker->role
                               : line.mindspeed ? "MindSpeed-MM's files"
                                                : "command line or a file");
  for (const auto& [name, place] : line.arguments.given) {
    if (const auto known = values_.find(name); known != values_.end()) known->second.origin = place;
  }
}

void ValueOrigins::note_changes(const Arguments& arguments, const std::string& origin) {
  for (auto& [name, value] : argument_values(arguments)) {
    Known& known = values_.at(name);
    if (known.value != value) known = {std::move(value), origin};
  }
}

}  // namespace megashard
