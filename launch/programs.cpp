#include "launch/programs.h"

#include <c10/util/Exception.h>

#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "framework/diagnostics.h"
#include "launch/checkpoints/convert.h"
#include "launch/checkpoints/inspect.h"
#include "launch/infer/infer.h"
#include "launch/plan/plan.h"
#include "launch/ranks/failure.h"
#include "launch/train/pretrain.h"

// Of c10, which declares it in no header: 2 shows errors, 3 fatal ones only.
extern int FLAGS_caffe2_log_level;

namespace megashard {
namespace {

constexpr int kFatalOnly = 3;

struct Subcommand {
  std::string_view name;
  std::string_view purpose;
  int (*run)(int argc, char** argv);  // argv[0] is the subcommand
};

const std::vector<Subcommand>& subcommands() {
  static const std::vector<Subcommand> all = {
      {"convert", "converts checkpoints and Hugging Face directories", run_convert},
      {"infer", "log-probabilities and continuations of a data set", run_infer},
      {"inspect", "shows, checks and compares checkpoints", run_inspect},
      {"plan", "whether a training fits, and how fast it will be", run_plan},
      {"pretrain", "trains a model", run_pretrain},
  };
  return all;
}

void print_help() {
  std::cout << "usage: megashard SUBCOMMAND [FLAGS]   (megashard SUBCOMMAND --help lists the flags)\n\n";
  for (const Subcommand& each : subcommands()) {
    std::cout << "  " << each.name << std::string(12 - each.name.size(), ' ') << each.purpose << "\n";
  }
  std::cout << "  launch      starts N ranks on this host: megashard launch -n N -- SUBCOMMAND ...\n"
               "  --version   prints the version\n\n"
               "MEGASHARD_STACK=1 in the environment shows the stack of an error.\n";
}

int run_subcommand(int argc, char** argv) {
  const std::string_view name = argc < 2 ? "--help" : argv[1];
  if (name == "--help" || name == "-h" || name == "help") {
    print_help();
    return 0;
  }
  std::string known;
  for (const Subcommand& each : subcommands()) {
    if (each.name == name) return each.run(argc - 1, argv + 1);
    known += std::string(each.name) + ", ";
  }
  throw UsageError("unknown subcommand '" + std::string(name) + "': known are " + known + "launch");
}

}  // namespace
}  // namespace megashard

int megashard_run(int argc, char** argv) {
  // What c10d logs before it throws would stand above the one message that the user needs.
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
