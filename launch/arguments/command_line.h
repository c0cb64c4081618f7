#pragma once

#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/arguments.h"
#include "framework/arguments/key_log.h"
#include "framework/mistakes.h"
#include "launch/mindspeed/mindspeed_run.h"
#include "launch/roll/roll_worker.h"

namespace megashard {

/// Thrown for --help: the caller prints the text and exits with code 0.
class HelpRequested : public std::exception {
 public:
  explicit HelpRequested(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// A flag of one program only.
struct OwnFlag {
  std::string flag;
  std::string kind;  ///< type of its single value, for the help; empty: a switch
  std::string help;

  bool is_switch() const { return kind.empty(); }
};

/// Command-line interface of a program besides the table's options.
struct Program {
  std::string name;     ///< "pretrain"
  std::string purpose;  ///< beginning of its help
  std::vector<OwnFlag> flags;
  std::function<bool(const Option&)> shown;  ///< selects the options listed in its help
  std::string examples{};                    ///< command lines at the end of its help
};

const Program& pretrain_program();
inline constexpr const char* kDryRun = "--dry-run";
inline constexpr const char* kWorldSize = "--world-size";  ///< with --dry-run, and for `megashard plan`
inline constexpr const char* kMachine = "--machine";       ///< with --dry-run

struct CommandLine {
  Arguments arguments;
  std::optional<RollWorker> worker;        ///< with --role
  std::optional<MindSpeedRun> mindspeed;   ///< from MindSpeed-MM's files
  std::map<std::string, std::string> own;  ///< given flags of the program itself; switches that are on: "true"
  std::vector<std::string> notices;        ///< messages for the user
  KeyLog keys;                             ///< with --dry-run: keys of the configuration file
  Mistakes mistakes;                       ///< in single flags; validate_arguments adds others

  std::string own_value(const std::string& flag, const std::string& otherwise) const {
    const auto found = own.find(flag);
    return found == own.end() ? otherwise : found->second;
  }
};

/// Parses `megashard pretrain [FILE.yaml] [flags]`; argv[0] is the subcommand. Flags override the YAML file (the first
/// word, or --config FILE), which with --role is ROLL's and may be one of MindSpeed-MM's native route. Abbreviations
/// are refused, `_` is equivalent to `-`, and of a repeated flag the last is used. Checks only single flags and
/// collects their errors in `mistakes`. Throws HelpRequested, and UsageErrors if a file that all other checks need is
/// wrong.
CommandLine parse_arguments(int argc, const char* const* argv, const Program& program = pretrain_program());

}  // namespace megashard
