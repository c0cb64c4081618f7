#pragma once

#include <string>
#include <vector>

#include "launch/shell/help_flags.h"

namespace megashard {

/// The completions of `megashard` for bash, zsh or fish. Throws UsageError for another shell.
std::string completion_script(const std::string& shell, const std::vector<HelpOfProgram>& programs);

/// A manual page in troff, of all programs (megashard.1) or of one (megashard-pretrain.1).
std::string manual_page(const std::vector<HelpOfProgram>& programs, const std::string& version);
std::string manual_page(const HelpOfProgram& program, const std::string& version);

}  // namespace megashard
