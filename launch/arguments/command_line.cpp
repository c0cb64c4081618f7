#include "launch/arguments/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <set>
#include <vector>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "launch/arguments/argument_file.h"

namespace megashard {

namespace {

constexpr const char* kConfig = "--config";
constexpr const char* kRole = "--role";
constexpr const char* kHelp =
    "megashard pretrain [FILE.yaml] [options]\n\n"
    "Trains a model. Options may also stand in a YAML file as snake_case keys, at the top or under "
    "gpt_args:; flags\n"
    "beat the file. Defaults are shown in [].\n\n"
    "  --config FILE\n      the YAML file, if it is not the first word\n"
    "  --role NAME\n      the worker to run, when the file is a configuration of ROLL\n";

bool is_flag(const std::string& word) { return word.starts_with("--") && word != "--"; }

/// The table's spelling of a flag that may be followed by "=VALUE".
std::string canonical_flag(const std::string& spelling) {
  if (spelling == kConfig || spelling == kRole) return spelling;
  if (const Option* option = find_option(spelling)) return option->flag;
  const auto suggestion = did_you_mean(spelling, option_spellings());
  throw UsageError("unknown flag " + spelling +
                   (suggestion.empty() ? "; `megashard pretrain --help` lists all." : suggestion));
}

struct CanonicalWords {
  std::vector<std::string> words;
  std::vector<const Option*> given;  // the options that stand in them
};

/// Each flag in the spelling of the table, each only once, and those that need a value with one.
CanonicalWords canonical_words(const std::vector<std::string>& words) {
  std::set<std::string> seen;
  CanonicalWords canonical;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto& word = words[i];
    if (!is_flag(word)) {
      canonical.words.push_back(word);
      continue;
    }
    const auto equals = word.find('=');
    const std::string flag = canonical_flag(word.substr(0, equals));
    if (!seen.insert(flag).second) throw UsageError(flag + " is given twice; keep one.");
    const Option* option = find_option(flag);
    const bool takes_value = option == nullptr || !option->is_switch();
    const bool followed = i + 1 < words.size() && !is_flag(words[i + 1]);
    if (takes_value && (equals == word.npos ? !followed : equals + 1 == word.size())) {
      throw UsageError(flag + " has no value; `megashard pretrain --help` shows what it takes.");
    }
    canonical.words.push_back(equals == word.npos ? flag : flag + word.substr(equals));
    if (option != nullptr) canonical.given.push_back(option);
  }
  return canonical;
}

void add_options(const std::vector<const Option*>& options, CLI::App& app) {
  app.set_help_flag();
  app.add_option(kConfig)->type_name("FILE");
  app.add_option(kRole)->type_name("NAME");
  for (const auto* option : options) {
    if (option->is_switch()) {
      app.add_flag(option->flag);
      continue;
    }
    auto* row = app.add_option(option->flag)->type_name("VALUE");
    if (option->words == Option::kAnyNumber) {
      row->expected(1, -1)->allow_extra_args();
    } else {
      row->expected(option->words);
    }
  }
}

void parse(CLI::App& app, std::vector<std::string> words) {
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  try {
    app.parse(words);
  } catch (const CLI::ExtrasError&) {
    throw UsageError("unexpected word \"" + app.remaining().front() +
                     "\"; values follow their flag, and `megashard "
                     "pretrain --help` lists all.");
  } catch (const CLI::ParseError& error) {
    throw UsageError(std::string(error.what()) +
                     "; `megashard pretrain --help` shows what each flag takes.");
  }
}

}  // namespace

CommandLine parse_arguments(int argc, const char* const* argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  for (const auto& word : words) {
    if (word == "--help" || word == "-h") throw HelpRequested(kHelp + options_help());
  }
  std::optional<std::string> file;
  if (!words.empty() && !words.front().starts_with('-')) {
    file = words.front();
    words.erase(words.begin());
  }
  auto canonical = canonical_words(words);
  CLI::App app;
  add_options(canonical.given, app);
  parse(app, std::move(canonical.words));
  if (app.count(kConfig) > 0) {
    if (file)
      throw UsageError("--config " + app[kConfig]->as<std::string>() + " and " + *file +
                       " are both YAML files; give one.");
    file = app[kConfig]->as<std::string>();
  }

  CommandLine line;
  Arguments& arguments = line.arguments;
  if (app.count(kRole) > 0) {
    const auto role = app[kRole]->as<std::string>();
    if (!file) throw UsageError("--role " + role + " needs --config, a configuration of ROLL.");
    line.worker = read_roll_worker(*file, role, arguments);
  } else if (file) {
    read_argument_file(*file, arguments);
  }
  for (const auto* option : canonical.given)
    set_option(*option, app[option->flag]->results(), arguments);
  if (arguments.data_args_path && arguments.data_path.empty()) {
    arguments.data_path = read_words(*arguments.data_args_path, "--data-args-path");
    arguments.data_args_path.reset();
  }
  return line;
}

}  // namespace megashard
