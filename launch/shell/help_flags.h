#pragma once

#include <string>
#include <vector>

namespace megashard {

/// A flag in a program's help.
struct HelpFlag {
  std::string name;  ///< "--lr-decay-style"
  bool takes_value = false;
  std::vector<std::string> choices{};  ///< choices of the value; empty: any
};

/// The flags of a program's --help, in order.
std::vector<HelpFlag> flags_in_help(const std::string& help);

/// A subcommand with its help, for completions and manual pages.
struct HelpOfProgram {
  std::string name, purpose, help;
};

}  // namespace megashard
