#pragma once

#include <string>
#include <vector>

namespace megashard {

/// A flag, as a program's help has it.
struct HelpFlag {
  std::string name;  ///< "--lr-decay-style"
  bool takes_value = false;
  std::vector<std::string> choices{};  ///< of the value; empty: any
};

/// The flags of a program's --help, in its order.
std::vector<HelpFlag> flags_in_help(const std::string& help);

/// A subcommand with its help, for completions and manual pages.
struct HelpOfProgram {
  std::string name, purpose, help;
};

}  // namespace megashard
