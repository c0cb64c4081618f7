#pragma once

#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "framework/arguments/arguments.h"
#include "launch/roll/roll_worker.h"

namespace megashard {

/// --help was given: the caller prints the text and exits with code 0.
class HelpRequested : public std::exception {
 public:
  explicit HelpRequested(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

struct CommandLine {
  Arguments arguments;
  std::optional<RollWorker> worker;  ///< of --role
};

/// The options of `megashard pretrain [FILE.yaml] [flags]`; argv[0] is the subcommand. Flags beat
/// the YAML file (the first word, or --config FILE), which with --role is ROLL's. Abbreviations are
/// refused; `_` counts as `-`. Only single flags are checked here; validate_arguments checks them
/// together. Throws UsageError and HelpRequested.
CommandLine parse_arguments(int argc, const char* const* argv);

}  // namespace megashard
