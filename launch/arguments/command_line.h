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
#include "framework/mistakes.h"
#include "launch/mindspeed/mindspeed_run.h"
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

/// A flag that only one program has.
struct OwnFlag {
  std::string flag;
  std::string kind;  ///< of its one value, for the help; empty: a switch
  std::string help;

  bool is_switch() const { return kind.empty(); }
};

/// What a program takes besides the table's options.
struct Program {
  std::string name;     ///< "pretrain"
  std::string purpose;  ///< the head of its help
  std::vector<OwnFlag> flags;
  std::function<bool(const Option&)> shown;  ///< options that its help lists
  std::string examples{};                    ///< the end of its help: command lines
};

const Program& pretrain_program();
inline constexpr const char* kDryRun = "--dry-run";
inline constexpr const char* kWorldSize = "--world-size";  ///< with --dry-run, and of `megashard plan`
inline constexpr const char* kMachine = "--machine";       ///< with --dry-run

struct CommandLine {
  Arguments arguments;
  std::optional<RollWorker> worker;        ///< of --role
  std::optional<MindSpeedRun> mindspeed;   ///< of its files
  std::map<std::string, std::string> own;  ///< the program's own flags that were given; switches that are on: "true"
  std::vector<std::string> notices;        ///< for the user to read
  Mistakes mistakes;                       ///< in single flags; validate_arguments adds its own

  std::string own_value(const std::string& flag, const std::string& otherwise) const {
    const auto found = own.find(flag);
    return found == own.end() ? otherwise : found->second;
  }
};

/// The options of `megashard pretrain [FILE.yaml] [flags]`; argv[0] is the subcommand. Flags beat
/// the YAML file (the first word, or --config FILE), which with --role is ROLL's, or may be that of
/// MindSpeed-MM's native route. Abbreviations are
/// refused, `_` counts as `-`, and of a flag that is given twice the last counts. Only single flags
/// are checked here: what is wrong with them is in `mistakes`. Throws HelpRequested, and
/// UsageErrors for a file without which nothing else can be checked.
CommandLine parse_arguments(int argc, const char* const* argv, const Program& program = pretrain_program());

}  // namespace megashard
