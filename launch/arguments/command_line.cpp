#include "launch/arguments/command_line.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>

#include "framework/arguments/argument_help.h"
#include "framework/arguments/nearest_name.h"
#include "launch/arguments/argument_file.h"
#include "launch/arguments/foreign_flags.h"
#include "launch/arguments/plugins.h"

namespace megashard {

namespace {

constexpr const char* kConfig = "--config";
constexpr const char* kRole = "--role";

std::vector<OwnFlag> own_flags(const Program& program) {
  std::vector<OwnFlag> flags = {{kConfig, "FILE", "the YAML file, if it is not the first word"},
                                {kRole, "NAME", "the worker to run, when the file is a configuration of ROLL"}};
  flags.insert(flags.end(), program.flags.begin(), program.flags.end());
  return flags;
}

/// False for negative numbers, which are values.
bool is_flag(const std::string& word) {
  if (word.size() < 2 || word[0] != '-') return false;
  return std::isdigit(static_cast<unsigned char>(word[1])) == 0 && word[1] != '.';
}

std::string own_help(const OwnFlag& flag) {
  return "  " + flag.flag + (flag.is_switch() ? "" : " " + flag.kind) + "\n" + help_lines(flag.help, 6);
}

std::string help_of(const Program& program) {
  std::string text = program.purpose;
  text += help_lines("`megashard " + program.name +
                         " --help WORDS` shows the flags that have them, --help --FLAG one, --help GROUP a group: " +
                         c10::Join(", ", option_groups()) + ".",
                     0) +
          "\n";
  for (const auto& each : own_flags(program)) text += own_help(each);
  return text + options_help(program.shown) + (program.examples.empty() ? "" : "\nExamples:\n" + program.examples);
}

std::string help_of_flag(const Program& program, const std::string& flag) {
  std::string spelling = flag;
  std::replace(spelling.begin() + 2, spelling.end(), '_', '-');
  const auto own = own_flags(program);
  const auto found = std::ranges::find(own, spelling, &OwnFlag::flag);
  if (found != own.end()) return own_help(*found);
  const Option* option = find_option(flag);
  if (option != nullptr) return flag_help(*option);
  const auto here = name_here(flag);
  throw UsageError("--help " + flag + ": there is no such flag" +
                   (here ? "; " + here->text : did_you_mean(flag, option_spellings())));
}

/// Help for a group of flags, named by its words, with - or spaces between them; otherwise for all flags that have the
/// words.
std::string help_of_words(const Program& program, const std::vector<std::string>& words) {
  std::string group = c10::Join(" ", words);
  std::ranges::replace(group, '-', ' ');
  const auto groups = option_groups();
  if (std::ranges::find(groups, group) != groups.end()) return group_help(group, program.shown);
  std::string text;
  for (const auto& each : own_flags(program)) {
    if (has_words(each.flag, each.help, words)) text += own_help(each);
  }
  text += search_help(words, program.shown);
  if (!text.empty()) return text;
  const auto hint = did_you_mean(group, groups);
  throw UsageError("--help " + group + ": there is no such group of flags" +
                   (hint.empty() ? ", and no flag has these words; there are " + c10::Join(", ", groups) + "." : hint));
}

/// Help for the words after --help.
std::string help_about(const Program& program, const std::vector<std::string>& words) {
  if (words.empty() || (is_flag(words.front()) && words.size() > 1)) return help_of(program);
  return is_flag(words.front()) ? help_of_flag(program, words.front()) : help_of_words(program, words);
}

/// Reads the words of a command line, flag by flag.
class WordReader {
 public:
  WordReader(const Program& program, CommandLine& line) : program_(program), own_(own_flags(program)), line_(line) {
    spellings_ = option_spellings();
    for (const auto& each : own_) spellings_.push_back(each.flag);
    spellings_.emplace_back("--help");
  }

  void read(const std::vector<std::string>& words) {
    std::string before;  // flag before the current word
    for (size_t i = 0; i < words.size();) {
      if (!is_flag(words[i])) {
        const size_t first = i;
        while (i < words.size() && !is_flag(words[i])) ++i;
        stray({words.begin() + first, words.begin() + i}, before);
        continue;
      }
      const auto equals = words[i].find('=');
      const std::string flag = words[i].substr(0, equals);
      std::vector<std::string> values;
      if (equals != words[i].npos) values.push_back(words[i].substr(equals + 1));
      ++i;
      before = flag;
      const size_t wanted = max_values(flag);
      while (values.size() < wanted && i < words.size() && !is_flag(words[i])) values.push_back(words[i++]);
      take(flag, std::move(values));
    }
  }

  /// Stores the values. Call it after the YAML file, which they override.
  void store() {
    for (const Option* option : order_) {
      line_.mistakes.attempt([&] { set_option(*option, given_.at(option), line_.arguments); }, {option->flag});
    }
  }

 private:
  const OwnFlag* find_own(const std::string& flag) const {
    if (!flag.starts_with("--")) return nullptr;
    std::string spelling = flag;
    std::replace(spelling.begin() + 2, spelling.end(), '_', '-');
    const auto found =
        std::find_if(own_.begin(), own_.end(), [&](const OwnFlag& each) { return each.flag == spelling; });
    return found == own_.end() ? nullptr : &*found;
  }

  const Option* find(const std::string& flag) const { return flag.starts_with("--") ? find_option(flag) : nullptr; }

  size_t max_values(const std::string& flag) const {
    if (const OwnFlag* own = find_own(flag)) return own->is_switch() ? 0 : 1;
    const Option* option = find(flag);
    const bool any = option == nullptr || option->nargs == Option::kAnyNumber;
    return any ? std::string::npos : static_cast<size_t>(option->nargs);
  }

  void take(const std::string& flag, std::vector<std::string> values) {
    if (const OwnFlag* own = find_own(flag)) return take_own(*own, values);
    const Option* option = find(flag);
    if (option == nullptr) return unknown(flag);
    if (option->is_switch() && values.empty()) values = {"true"};
    const auto [at, is_new] = given_.try_emplace(option, values);
    if (is_new) {
      order_.push_back(option);
    } else if (at->second != values) {
      note_twice(option->flag, c10::Join(" ", at->second), c10::Join(" ", values));
      at->second = values;
    }
  }

  void take_own(const OwnFlag& own, const std::vector<std::string>& values) {
    if (own.is_switch()) return take_own_switch(own, values.empty() ? "true" : values.front());
    if (values.empty() || values.front().empty()) {
      line_.mistakes.add(own.flag + " has no value; write " + own.flag + " " + own.kind + ".", {own.flag});
      return;
    }
    const auto [at, is_new] = line_.own.try_emplace(own.flag, values.front());
    if (is_new || at->second == values.front()) return;
    note_twice(own.flag, at->second, values.front());
    at->second = values.front();
  }

  void take_own_switch(const OwnFlag& own, const std::string& value) {
    line_.mistakes.require(value == "true" || value == "false",
                           own.flag + " takes no value (or true / false), got \"" + value + "\".");
    if (value == "true") line_.own[own.flag] = value;
  }

  void note_twice(const std::string& flag, const std::string& before, const std::string& after) {
    line_.notices.push_back(flag + " is given twice, as " + before + " and as " + after + "; the last one counts.");
  }

  void unknown(const std::string& flag) {
    if (const Option* opposite = opposite_of(flag)) {
      const bool negates = flag.starts_with("--no");
      line_.mistakes.add("unknown flag " + flag + "; leave it out: " +
                         (negates ? "it is off unless " + opposite->flag + " is given."
                                  : "only " + opposite->flag + " changes that."));
      return;
    }
    if (const auto here = name_here(flag)) {
      line_.mistakes.add("unknown flag " + flag + "; " + here->text + ".", here->flags);
      return;
    }
    const auto nearest = nearest_name(flag, spellings_);
    line_.mistakes.add(
        "unknown flag " + flag +
            (nearest ? "; did you mean " + *nearest + "?" : "; `megashard " + program_.name + " --help` lists all."),
        nearest ? std::vector{*nearest} : std::vector<std::string>{});
  }

  /// Finds --x for --no-x, and --no-x for --x.
  static const Option* opposite_of(const std::string& flag) {
    if (!flag.starts_with("--")) return nullptr;
    const bool negates = flag.starts_with("--no-") || flag.starts_with("--no_");
    return find_option(negates ? "--" + flag.substr(5) : "--no-" + flag.substr(2));
  }

  /// Reports words that belong to no flag.
  void stray(const std::vector<std::string>& words, const std::string& before) {
    std::string message = "unexpected word" + std::string(words.size() > 1 ? "s " : " ") + "\"" +
                          c10::Join("\" \"", words) + "\"" + (before.empty() ? "" : " after " + before);
    const Option* option = find(before);
    const OwnFlag* own = find_own(before);
    const bool is_switch = own != nullptr ? own->is_switch() : option != nullptr && option->is_switch();
    const std::array truths = {"true", "false", "True", "False"};
    const bool is_truth = std::find(truths.begin(), truths.end(), words.front()) != truths.end();
    if (is_switch && is_truth && words.size() == 1) {
      const bool on = words.front().ends_with("rue");
      const auto& flag = own != nullptr ? own->flag : option->flag;
      message += "; a switch takes none: " + (on ? "leave it out." : "write " + flag + "=false.");
    } else if (words.front().starts_with("\u2013") || words.front().starts_with("\u2014")) {
      message += "; flags begin with two plain hyphens, and this one with a long dash.";
    } else if (words.front().find_first_not_of(" \n\t") == std::string::npos) {
      message += "; a backslash that continues a line must be its last character.";
    } else {
      message += "; values follow their flag, and `megashard " + program_.name + " --help` shows how many each takes.";
    }
    line_.mistakes.add(message);
  }

  const Program& program_;
  std::vector<OwnFlag> own_;
  std::vector<std::string> spellings_;  // suggestions for misspelt flags
  CommandLine& line_;
  std::map<const Option*, std::vector<std::string>> given_;
  std::vector<const Option*> order_;
};

}  // namespace

const Program& pretrain_program() {
  static const Program program = {
      .name = "pretrain",
      .purpose = "megashard pretrain [FILE.yaml] [options]\n\n"
                 "Trains a model. Options may also be snake_case keys of a YAML file, at the top\n"
                 "or under gpt_args:; flags override the file. Defaults are shown in [].\n",
      .flags = {{kDryRun, "",
                 "print the arguments and their sources, the units, the data and a plan "
                 "(docs/plan.md), without training"},
                {kWorldSize, "INT", "ranks, with --dry-run [the launcher's]"},
                {kMachine, "NAME|FILE",
                 "with --dry-run: device of the plan, a name or a file, as for `megashard plan "
                 "--device` [h200]"}},
      .shown = [](const Option&) { return true; },
      .examples = "  megashard pretrain run.yaml --dry-run      # what it would do\n"
                  "  megashard launch -n 2 -- pretrain run.yaml --lr 1e-4\n"
                  "  megashard pretrain run.yaml --save runs/a --save-interval 100 --load runs/a\n"};
  return program;
}

CommandLine parse_arguments(int argc, const char* const* argv, const Program& program) {
  std::vector<std::string> words(argv + 1, argv + argc);
  load_plugins(words);
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "--help" && words[i] != "-h") continue;
    throw HelpRequested(help_about(program, {words.begin() + static_cast<std::ptrdiff_t>(i) + 1, words.end()}));
  }
  std::optional<std::string> file;
  if (!words.empty() && !words.front().starts_with('-')) {
    file = words.front();
    if (std::filesystem::is_regular_file(*file + "/config.json"))
      throw UsageError(*file + " is the folder of a model; give --hf-model " + *file);
    words.erase(words.begin());
  }
  CommandLine line;
  WordReader reader(program, line);
  reader.read(words);
  Mistakes& mistakes = line.mistakes;
  Arguments& arguments = line.arguments;
  if (const auto config = line.own.find(kConfig); config != line.own.end()) {
    mistakes.require(!file,
                     "--config " + config->second + " and " + file.value_or("") + " are both YAML files; give one.");
    file = config->second;
  }
  const auto role = line.own.find(kRole);
  mistakes.require(role == line.own.end() || file, "--role " + (role == line.own.end() ? "" : role->second) +
                                                       " needs --config, a configuration of ROLL.");
  KeyLog* log = line.own.contains(kDryRun) ? &line.keys : nullptr;
  bool readable = true;
  if (file && role != line.own.end()) {
    readable = mistakes.attempt([&] { line.worker = read_roll_worker(*file, role->second, arguments, log); });
  } else if (file && !is_native_configuration(*file)) {
    readable = mistakes.attempt([&] { read_argument_file(*file, arguments, mistakes, log); });
  }
  reader.store();
  for (const std::string& path : arguments.callback_plugin)
    mistakes.attempt([&] { load_plugin(kCallbackPlugin, path); });
  for (const std::string& path : arguments.loss_plugin) mistakes.attempt([&] { load_plugin(kLossPlugin, path); });
  if (!readable) mistakes.throw_if_any();  // without the file, much would be reported as missing
  if (!line.worker) line.mindspeed = read_mindspeed(file, arguments, mistakes, log);
  if (arguments.data_args_path && arguments.data_path.empty()) {
    const bool read = mistakes.attempt(
        [&] { arguments.data_path = read_words(*arguments.data_args_path, "--data-args-path"); }, {"--data-path"});
    if (read) arguments.data_args_path.reset();
  }
  return line;
}

}  // namespace megashard
