#include "launch/programs.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <filesystem>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/mapped_ranges.h"
#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "launch/plan/dry_run.h"
#include "launch/ranks/failure.h"
#include "launch/ranks/launch_command.h"
#include "launch/shell/completion.h"
#include "launch/shell/subcommands.h"
#include "launch/train/pretrain.h"

// Declared by c10 in no header: 2 logs errors, 3 only fatal ones.
extern int FLAGS_caffe2_log_level;

namespace megashard {
namespace {

constexpr int kFatalOnly = 3;

struct Subcommand {
  std::string name;
  std::string purpose;
  int (*run)(int argc, char** argv);  // argv[0] is the subcommand
};

int print_completion(int argc, char** argv);
int print_manual(int argc, char** argv);
std::string unknown_subcommand(const std::string& name);

const std::vector<Subcommand>& subcommands() {
  static const std::vector<Subcommand> all = {
      {"convert", "converts checkpoints and Hugging Face directories", run_convert},
      {"generate", "samples answers to prompts, for training on them", run_generate},
      {"infer", "log-probabilities and continuations of a data set", run_infer},
      {"inspect", "shows, checks and compares checkpoints", run_inspect},
      {"models", "the families of models, and how each can be trained", run_models},
      {"plan", "whether a training fits, and how fast it will be", run_plan},
      {"pretrain", "trains a model", [](int argc, char** argv) { return run_pretrain(argc, argv, run_dry_run); }},
      {"rl", "trains on rollouts while others sample them: the trainer of prime-rl",
       [](int argc, char** argv) { return run_rl(argc, argv, run_dry_run); }},
      {"serve", "trains on losses that another process computes, such as verl's and ROLL's", run_serve},
      {"report", "an HTML page about runs: curves, memory, timeline, checkpoints", run_report},
      {"launch", "starts N ranks on this host: megashard launch -n N -- SUBCOMMAND ...", run_launch},
      {"completion", "prints the completions for bash, zsh or fish, or all flags as JSON", print_completion},
      {"man", "prints the manual page of a subcommand, or of all", print_manual},
  };
  return all;
}

std::string unknown_subcommand(const std::string& name) {
  std::vector<std::string> known;
  for (const Subcommand& each : subcommands()) known.push_back(each.name);
  auto meant = known;
  meant.insert(meant.end(), {"--help", "--version"});
  if (std::filesystem::is_regular_file(name))
    return "unknown subcommand '" + name + "'; launch starts a program of yours by its path: ./" + name;
  const auto hint = did_you_mean(name, meant);
  return "unknown subcommand '" + name + "'" + (hint.empty() ? ": known are " + c10::Join(", ", known) : hint);
}

/// Output of `megashard SUBCOMMAND --help`.
std::string help_of(const Subcommand& program) {
  std::ostringstream text;
  auto* const standard = std::cout.rdbuf(text.rdbuf());
  std::string name = program.name, help = "--help";
  char* words[] = {name.data(), help.data(), nullptr};
  program.run(2, words);
  std::cout.rdbuf(standard);
  return text.str();
}

std::vector<HelpOfProgram> help_of_all() {
  std::vector<HelpOfProgram> all;
  for (const Subcommand& each : subcommands()) all.push_back({each.name, each.purpose, help_of(each)});
  return all;
}

/// The word after a subcommand; empty for --help or none.
std::string word_of(int argc, char** argv, const std::string& usage) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word != "--help" && word != "-h") return word;
  std::cout << "usage: megashard " << usage << "\n";
  return "";
}

int print_completion(int argc, char** argv) {
  const std::string shell =
      word_of(argc, argv, "completion bash|zsh|fish|json\n\nExample:\n  source <(megashard completion bash)");
  if (argc < 2) throw UsageError("completion needs the name of a shell: bash, zsh or fish; or json.");
  if (!shell.empty()) std::cout << completion_script(shell, help_of_all());
  return 0;
}

int print_manual(int argc, char** argv) {
  const std::string name = word_of(argc, argv, "man [SUBCOMMAND]\n\nExample:\n  megashard man pretrain | man -l -");
  if (argc > 1 && name.empty()) return 0;
  for (const Subcommand& each : subcommands()) {
    if (each.name == name) {
      std::cout << manual_page({each.name, each.purpose, help_of(each)}, MEGASHARD_VERSION);
      return 0;
    }
  }
  if (!name.empty()) throw UsageError(unknown_subcommand(name));
  std::cout << manual_page(help_of_all(), MEGASHARD_VERSION);
  return 0;
}

void print_help() {
  std::cout << "usage: megashard SUBCOMMAND [FLAGS]   (megashard SUBCOMMAND --help lists the flags)\n\n";
  for (const Subcommand& each : subcommands()) {
    std::cout << "  " << each.name << std::string(12 - each.name.size(), ' ') << each.purpose << "\n";
  }
  std::cout << "  --version   prints the version, and what it was built against\n\n"
               "MEGASHARD_STACK=1 in the environment shows the stack of an error.\n";
}

int run_subcommand(int argc, char** argv) {
  const std::string_view name = argc < 2 ? "--help" : argv[1];
  if (name == "--help" || name == "-h" || name == "help") {
    print_help();
    return 0;
  }
  for (const Subcommand& each : subcommands()) {
    if (each.name == name) return each.run(argc - 1, argv + 1);
  }
  throw UsageError(unknown_subcommand(std::string(name)));
}

}  // namespace
}  // namespace megashard

int megashard_run(int argc, char** argv) {
  megashard::end_at_terminate();
  megashard::end_at_lost_bytes(megashard::end_in_signal_handler());
  // c10d's log before an exception would precede the error message.
  if (!megashard::show_stack()) FLAGS_caffe2_log_level = megashard::kFatalOnly;
  const auto text = [](const c10::Error& error) {
    return std::string(megashard::show_stack() ? error.what() : error.what_without_backtrace());
  };
  try {
    return megashard::run_subcommand(argc, argv);
  } catch (const c10::DistError& error) {
    throw megashard::PeerLostError(text(error));
  } catch (const c10::Error& error) {
    throw std::runtime_error(text(error));
  }
}
