#pragma once

#include <string>
#include <vector>

namespace megashard {

/// A subcommand with its help, for completions and manual pages.
struct HelpOfProgram {
  std::string name, purpose, help;
};

/// Completion script of `megashard` for bash, zsh or fish, or "json": all flags with types, defaults and explanations.
/// Throws UsageError for other words.
std::string completion_script(const std::string& shell, const std::vector<HelpOfProgram>& programs);

/// A manual page in troff, for all programs (megashard.1) or for one (megashard-pretrain.1).
std::string manual_page(const std::vector<HelpOfProgram>& programs, const std::string& version);
std::string manual_page(const HelpOfProgram& program, const std::string& version);

}  // namespace megashard
