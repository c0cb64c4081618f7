#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "framework/diagnostics.h"
#include "launch/train/pretrain.h"

namespace megashard {
namespace {

constexpr const char* kHelp = "megashard rl RUN [FILE.yaml] [options of megashard pretrain]\n\n"
                              "Trains on answers that other processes sample meanwhile, and publishes the weights\n"
                              "for them: the trainer of prime-rl (docs/reinforcement_learning.md). These options\n"
                              "stand for the folder of the run, where they are not given: --rollouts RUN/rollouts,\n"
                              "--publish-weights RUN/broadcasts. All the others:\n\n";

/// True if the words give this flag.
bool gives(const std::vector<std::string>& words, const std::string& flag) {
  return std::ranges::any_of(words, [&](std::string word) {
    std::ranges::replace(word, '_', '-');
    return word == flag || word.starts_with(flag + "=");
  });
}

}  // namespace

int run_rl(int argc, char** argv, DryRun dry_run) {
  const std::string run = argc > 1 ? argv[1] : "";
  if (run == "--help" || run == "-h") {
    if (argc == 2) std::cout << kHelp;
    return run_pretrain(argc, argv, dry_run);
  }
  if (run.empty() || run.starts_with("-"))
    throw UsageError("rl: the folder of the run comes first: megashard rl RUN ...");
  std::vector<std::string> words{"rl"};
  words.insert(words.end(), argv + 2, argv + argc);
  const auto add = [&](const std::string& flag, const std::string& value) {
    if (!gives(words, flag)) words.insert(words.end(), {flag, value});
  };
  add("--rollouts", run + "/rollouts");
  add("--publish-weights", run + "/broadcasts");
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return run_pretrain(static_cast<int>(words.size()), pointers.data(), dry_run);
}

}  // namespace megashard
