#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace megashard {

/// Formats the help of subcommands parsed by CLI11 like that of `megashard pretrain`: a flag with the type of its value
/// (type_name), and its explanation below, in lines of kHelpWidth columns. Inherited by an App's subcommands.
class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
};

}  // namespace megashard
