#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "framework/arguments/argument_table.h"
#include "tests/support/diagnostics.h"

// Every flag of Megatron-LM and MindSpeed-MM is in the table, and takes as many values as there.
// tests/golden/make_megatron_flags.py wrote the first list.

namespace megashard {
namespace {

using testing::IsEmpty;

struct TheirFlag {
  std::string origin;  // written, generated (both Megatron's), mindspeed
  std::string values;  // 0, a number, +, *
  std::string kind;    // switch, int, float, bool, text
  std::string value;   // their default; "-": none
  std::vector<std::string> spellings;
};

std::vector<TheirFlag> read_flags(const std::string& name) {
  std::ifstream file(std::string(MEGASHARD_SOURCE_ROOT) + "/tests/golden/" + name);
  std::vector<TheirFlag> flags;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    TheirFlag flag;
    std::string spellings;
    words >> flag.origin >> flag.values >> flag.kind >> spellings >> flag.value;
    std::istringstream list(spellings);
    for (std::string each; std::getline(list, each, ',');) flag.spellings.push_back(each);
    flags.push_back(std::move(flag));
  }
  return flags;
}

const std::vector<TheirFlag>& their_flags() {
  static const auto all = [] {
    auto flags = read_flags("megatron_flags.txt");
    for (auto& flag : read_flags("mindspeed_flags.txt")) flags.push_back(std::move(flag));
    return flags;
  }();
  return all;
}

int words_of(const TheirFlag& flag) {
  const bool many = flag.values == "+" || flag.values == "*";
  return many ? Option::kAnyNumber : std::stoi(flag.values);
}

TEST(MegatronFlags, AreAllKnown) {
  std::vector<std::string> unknown;
  std::map<std::string, std::map<OptionStatus, int>> counts;
  for (const auto& flag : their_flags()) {
    for (const auto& spelling : flag.spellings) {
      if (find_option(spelling) == nullptr) unknown.push_back(spelling);
    }
    const Option* option = find_option(flag.spellings.front());
    if (option != nullptr) ++counts[flag.origin][option->status];
  }
  for (auto& [origin, of] : counts) {
    std::printf("%-10s %4d work, %4d without effect, %4d refused\n", origin.c_str(), of[OptionStatus::kUsed],
                of[OptionStatus::kWithoutEffect], of[OptionStatus::kRefused]);
  }
  EXPECT_THAT(unknown, IsEmpty());
  EXPECT_EQ(std::count_if(their_flags().begin(), their_flags().end(),
                          [](const TheirFlag& flag) { return flag.origin == "written"; }),
            366);
}

TEST(MegatronFlags, TakeAsManyValuesAsThere) {
  for (const auto& flag : their_flags()) {
    for (const auto& spelling : flag.spellings) {
      const Option* option = find_option(spelling);
      if (option == nullptr) continue;
      EXPECT_EQ(option->nargs, words_of(flag)) << spelling;
    }
  }
}

TEST(MegatronFlags, ThatAreRefusedMayHaveTheirDefault) {
  const std::set<std::string> never = {"--rerun-mode"};  // Megatron's default is to rerun
  for (const auto& flag : their_flags()) {
    const Option* option = find_option(flag.spellings.front());
    if (option == nullptr || option->status != OptionStatus::kRefused || flag.value == "-" ||
        never.contains(option->flag))
      continue;
    Arguments arguments;
    EXPECT_NO_THROW(set_option(*option, {flag.value}, arguments)) << option->flag << " " << flag.value;
  }
}

TEST(MegatronFlags, ThatAreRefusedSayWhatToDoInstead) {
  for (const auto& option : option_table()) {
    if (option.status != OptionStatus::kRefused) continue;
    EXPECT_FALSE(option.reason.ends_with('.')) << option.flag;
    Arguments arguments;
    const std::vector<std::string> words(option.is_switch() ? 0 : 1, "x");
    EXPECT_EQ(usage_error([&] { set_option(option, words, arguments); }),
              option.flag + " is refused: " + option.reason + ".");
  }
}

TEST(MegatronFlags, ThatAreRefusedLetAnyFormOfTheirNeutralNumberThrough) {
  Arguments arguments;
  const Option& option = *find_option("--glu-linear-offset");
  for (const char* zero : {"0", "0.0", "0e0"}) set_option(option, {zero}, arguments);
  EXPECT_NE(usage_error([&] { set_option(option, {"0", "2"}, arguments); }), "");
  EXPECT_NE(usage_error([&] { set_option(option, {"zero"}, arguments); }), "");
}

TEST(MegatronFlags, OfALossOfBalanceTakeOne) {
  Arguments arguments;
  const Option& option = *find_option("--moe-aux-loss-coeff");
  set_option(option, {"1e-2"}, arguments);
  EXPECT_EQ(arguments.moe_aux_loss_coeff, 1e-2);
  EXPECT_EQ(usage_error([&] {
              set_option(option, {"0", "1e-2"}, arguments);
            }),
            "--moe-aux-loss-coeff takes one value here, got 2.");
}

}  // namespace
}  // namespace megashard
