#include "launch/config/config.h"

#include <CLI/CLI.hpp>

#include <map>

#include "framework/diagnostics.h"
#include "launch/checkpoints/flag_mistakes.h"
#include "launch/config/checked_file.h"
#include "launch/output/help_format.h"
#include "launch/output/print_line.h"
#include "launch/ranks/failure.h"

namespace megashard {
namespace {

std::string line_of(const KeyNote& note) {
  const std::string place = note.source + ":" + std::to_string(note.line) + ": " + note.key;
  switch (note.use) {
    case KeyNote::Use::kRead:
      return place + ": read as " + note.text;
    case KeyNote::Use::kIgnored:
      return place + ": ignored: " + note.text;
    case KeyNote::Use::kRefused:
      return place + ": REFUSED: " + note.text;
  }
  return "";
}

int check(const std::vector<std::string>& files, const std::optional<std::string>& role) {
  std::map<KeyNote::Use, int64_t> uses;
  size_t mistakes = 0;
  for (const auto& path : files) {
    const CheckedFile file = check_file(path, role);
    print_line(path + ": " + file.dialect);
    for (const auto& note : file.keys) {
      print_line(line_of(note));
      ++uses[note.use];
    }
    for (const auto& mistake : file.mistakes) print_line("REFUSED: " + mistake);
    mistakes += file.mistakes.size();
  }
  const int64_t refused = uses[KeyNote::Use::kRefused];
  print_line("keys: " + std::to_string(uses[KeyNote::Use::kRead]) + " read, " +
             std::to_string(uses[KeyNote::Use::kIgnored]) + " ignored, " + std::to_string(refused) + " refused" +
             (mistakes == 0 ? "" : "; and " + std::to_string(mistakes) + " other mistakes"));
  return refused == 0 && mistakes == 0 ? 0 : kExitUsage;
}

}  // namespace

int run_config(int argc, char** argv) {
  CLI::App app("what becomes of each key of configuration files", "megashard config");
  app.formatter(std::make_shared<HelpFormat>());
  std::vector<std::string> files;
  std::optional<std::string> role;
  app.add_option("--check", files,
                 "YAML or JSON: a file of pretrain's flags, an FSDP2 file, a configuration of ROLL, files of "
                 "MindSpeed-MM, or a device of megashard plan; exits with 2 if it would be refused")
      ->required()
      ->type_name("FILE");
  app.add_option("--role", role, "the worker of a configuration of ROLL; else all that can be run here")
      ->type_name("NAME");
  app.footer("Examples:\n"
             "  megashard config --check run.yaml fsdp2_config.yaml\n"
             "  megashard config --check roll.yaml --role actor_train");
  if (!parse_words(app, argc, argv, "", "; `megashard config --help` lists the flags")) return 0;
  return check(files, role);
}

}  // namespace megashard
