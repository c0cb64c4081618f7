#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "framework/diagnostics.h"
#include "launch/train/pretrain.h"

namespace megashard {
namespace {

constexpr const char* kHelp =
    "usage: megashard rl RUN [FILE.yaml] [flags of megashard pretrain]\n"
    "\n"
    "Trains on answers that other processes sample meanwhile, and publishes the weights for them: the trainer of "
    "prime-rl.\n"
    "It is `megashard pretrain` with these flags, where they are not given:\n"
    "  --rollouts RUN/rollouts            step_N/rank_R.bin of prime-rl, or step_N/rollouts.vision.safetensors\n"
    "  --publish-weights RUN/broadcasts   step_N with safetensors, and STABLE\n"
    "  --objective prime-rl\n"
    "docs/reinforcement_learning.md has the files and an example.\n"
    "\n"
    "Example:\n"
    "  megashard launch -n 2 -- rl RUN --use-torch-fsdp2 --hf-model DIR --seq-length 2048 --train-iters 100 --lr "
    "1e-6\n";

/// True if the words give this flag.
bool gives(const std::vector<std::string>& words, const std::string& flag) {
  return std::ranges::any_of(words, [&](std::string word) {
    std::ranges::replace(word, '_', '-');
    return word == flag || word.starts_with(flag + "=");
  });
}

}  // namespace

int run_rl(int argc, char** argv, DryRun dry_run) {
  const std::string run = argc > 1 ? argv[1] : "--help";
  if (run == "--help" || run == "-h") {
    std::cout << kHelp;
    return 0;
  }
  if (run.starts_with("-")) throw UsageError("rl: the folder of the run comes first: megashard rl RUN ...");
  std::vector<std::string> words{"rl"};
  words.insert(words.end(), argv + 2, argv + argc);
  const auto add = [&](const std::string& flag, const std::string& value) {
    if (!gives(words, flag)) words.insert(words.end(), {flag, value});
  };
  add("--rollouts", run + "/rollouts");
  add("--publish-weights", run + "/broadcasts");
  add("--objective", "prime-rl");
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return run_pretrain(static_cast<int>(words.size()), pointers.data(), dry_run);
}

}  // namespace megashard
