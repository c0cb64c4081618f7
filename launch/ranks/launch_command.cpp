#include "launch/ranks/launch_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>

#include "framework/arguments/nearest_name.h"
#include "framework/diagnostics.h"
#include "launch/output/help_format.h"
#include "launch/ranks/launch_group.h"

namespace megashard {
namespace {

constexpr const char* kUsage = "usage: megashard launch -n N [--master-port P] -- SUBCOMMAND|PROGRAM ...";

/// Throws if a flag is given in place of a subcommand: launch does not know it.
void refuse_flag(const std::vector<std::string>& subcommand) {
  if (subcommand.empty() || subcommand.front().rfind("-", 0) != 0 || subcommand.front() == "--") {
    return;
  }
  const auto& flag = subcommand.front();
  const bool is_number = flag.starts_with("--nproc") || flag.starts_with("--num") || flag == "-np";
  const auto hint = is_number ? "; did you mean -n?" : did_you_mean(flag, {"--processes", "--master-port", "--parent"});
  throw UsageError("launch: unknown flag " + flag + (hint.empty() ? ";" : hint) + " " + kUsage);
}

/// A word with a slash is a program, others are subcommands of this one.
bool names_program(const std::string& word) {
  if (word.find('/') == word.npos) return false;
  if (!std::filesystem::is_regular_file(word)) throw UsageError("launch: there is no program " + word + ".");
  if (access(word.c_str(), X_OK) != 0)
    throw UsageError("launch: " + word + " may not be executed; chmod +x " + word + " allows it.");
  return true;
}

}  // namespace

int run_launch(int argc, char** argv) {
  CLI::App app("Starts N ranks of a subcommand, or of a program by its path, on this host.", "megashard launch");
  app.formatter(std::make_shared<HelpFormat>());
  LaunchGroupOptions options;
  app.add_option("-n,--processes", options.processes, "number of ranks, from 1 to 4096")
      ->required()
      ->check(CLI::Range(1, 4096))
      ->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  app.add_option("--master-port", options.master_port, "port of rank 0's store; unset: a free one")
      ->check(CLI::Range(1, 65535));
  app.add_option("--parent", options.parent, "the process that starts this one: the ranks end when it does")
      ->check(CLI::PositiveNumber);
  app.prefix_command();
  app.footer("Examples:\n  megashard launch -n 2 -- pretrain run.yaml\n  megashard launch -n 2 -- ./my_program");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << kUsage << "\n" << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    refuse_flag(app.remaining());
    throw UsageError("launch: " + std::string(error.what()) + "; " + kUsage);
  }
  std::vector<std::string> subcommand = app.remaining();
  if (!subcommand.empty() && subcommand.front() == "--") subcommand.erase(subcommand.begin());
  if (subcommand.empty()) {
    throw UsageError("launch: no subcommand to start: megashard launch -n 2 -- pretrain ...");
  }
  refuse_flag(subcommand);
  if (subcommand.front() == "launch")
    throw UsageError("launch: launch cannot be started by launch; name it once. " + std::string(kUsage));
  if (!names_program(subcommand.front())) options.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  options.command.insert(options.command.end(), subcommand.begin(), subcommand.end());
  return run_launch_group(options);
}

}  // namespace megashard
