#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace megashard {

/// The help of subcommands whose flags CLI11 reads, as that of `megashard pretrain`: a flag with the kind of its value
/// (type_name), and below it its explanation, in lines of kHelpWidth columns. Its App's subcommands inherit it.
class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
};

}  // namespace megashard
