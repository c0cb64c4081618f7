// Saves whose every single change of the disk fails, or is the last: an error, a kill, a power cut.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "checkpoint/steps/manifest.h"
#include "tests/checkpoint/temporary_folder.h"
#include "tests/faults/failing_io.h"
#include "tests/faults/known_step.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::HasSubstr;

/// Empty: it went well.
std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

struct Scenario {
  const char* name;
  std::vector<Mark> before;
  Mark now;
  RetentionPolicy retention{};
  bool without_exchange = false;
};

struct Trouble {
  const char* name;
  int error;
  bool for_good = false;
  bool power_cut = false;
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}
std::ostream& operator<<(std::ostream& out, const Trouble& trouble) { return out << trouble.name; }

const Scenario kScenarios[] = {
    {"FirstStep", {}, {1, 0}},
    {"NextStep", {{1, 0}}, {2, 0}},
    {"SameStep", {{1, 0}}, {1, 1}},
    {"SameStepWithoutExchange", {{1, 0}}, {1, 1}, {}, true},
    {"OldStepsGo", {{1, 0}, {2, 0}}, {3, 0}, {.most_recent = 2}},
};
const Trouble kTroubles[] = {
    {"NoSpace", ENOSPC},
    {"BadDisk", EIO},
    {"Killed", EIO, true},
    {"PowerCut", EIO, true, true},
};

class FaultTest : public ::testing::TestWithParam<std::tuple<Scenario, Trouble>> {
 protected:
  const Scenario& scenario() const { return std::get<0>(GetParam()); }
  const Trouble& trouble() const { return std::get<1>(GetParam()); }

  /// Fails the call after `calls` others; false when the save makes no more than that.
  bool save_with_failure(FailingDisk& disk, const std::string& directory, int64_t calls) const {
    if (scenario().without_exchange) disk.refuse_exchange();
    const SaveOptions options{.retention = scenario().retention};
    std::optional<Mark> before;
    for (const auto& mark : scenario().before) {
      save_known_step(directory, mark, nullptr, options);
      before = mark;
    }
    disk.fail_after(calls, trouble().error, trouble().for_good);
    const auto failure =
        failure_of([&] { save_known_step(directory, scenario().now, nullptr, options); });
    const bool failed = disk.has_failed();
    if (trouble().power_cut) disk.lose_power();  // also when all went well
    disk.recover();

    const auto found = load_known_step(directory, nullptr, {.depth = VerifyDepth::kBytes});
    if (failure.empty()) {
      EXPECT_EQ(found, scenario().now);
    } else {
      EXPECT_TRUE(found == before || found == scenario().now) << failure;
      EXPECT_THAT(failure, HasSubstr(directory.substr(0, directory.rfind("/runs/"))));
      EXPECT_THAT(failure, HasSubstr(std::strerror(trouble().error)));
    }
    if (std::filesystem::exists(directory)) {
      for (const auto& step : list_steps(directory))
        EXPECT_EQ(step_damage(step.folder, VerifyDepth::kBytes), "");
    }
    return failed;
  }

  static void expect_next_save_cleans(const std::string& directory) {
    save_known_step(directory, {9, 0}, nullptr);
    EXPECT_EQ(load_known_step(directory, nullptr), (Mark{9, 0}));
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      const auto name = entry.path().filename().string();
      EXPECT_TRUE(name.starts_with("iter_") || name == "latest_checkpointed_iteration.txt") << name;
    }
  }
};

TEST_P(FaultTest, AWholeStepIsAlwaysThere) {
  int64_t calls = 0;
  for (bool failed = true; failed && !HasFailure(); ++calls) {
    SCOPED_TRACE("the call after " + std::to_string(calls));
    TemporaryFolder folder;
    const auto directory = folder.file("runs/save");
    FailingDisk disk(folder.path());
    failed = save_with_failure(disk, directory, calls);
    expect_next_save_cleans(directory);
  }
  EXPECT_GT(calls, 15);
}

INSTANTIATE_TEST_SUITE_P(Faults, FaultTest,
                         ::testing::Combine(::testing::ValuesIn(kScenarios),
                                            ::testing::ValuesIn(kTroubles)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  std::get<1>(info.param).name;
                         });

TEST(Faults, AllRanksGiveUpTogetherInTheSameWords) {
  bool failed = true;
  for (int64_t calls = 0; failed; ++calls) {
    TemporaryFolder folder;
    const auto directory = folder.file("save");
    FailingDisk disk(directory);
    save_known_step(directory, {1, 0}, nullptr);
    disk.fail_after(calls, ENOSPC, false);
    std::vector<std::string> failures(3);
    run_ranks(3, [&](const ProcessGroupPtr& group) {
      failures[static_cast<size_t>(group->rank())] = failure_of([&] {
        save_known_step(directory, {2, 0}, group);
      });
    });
    failed = disk.has_failed();
    disk.recover();
    ASSERT_EQ(failures[0].empty(), !failed) << calls;
    ASSERT_EQ(failures[0], failures[1]);
    ASSERT_EQ(failures[0], failures[2]);
    ASSERT_TRUE(!failed || failures[0].find("No space left on device") != std::string::npos)
        << failures[0];
    ASSERT_TRUE(load_known_step(directory, nullptr).has_value());
  }
}

TEST(Faults, ARankThatHangsEndsTheSaveOfTheOthers) {
  TemporaryFolder folder;
  save_known_step(folder.path(), {1, 0}, nullptr);
  constexpr auto kDeadline = std::chrono::milliseconds(500);
  const auto save_late = [&](const ProcessGroupPtr& group) {
    if (group->rank() == 1) std::this_thread::sleep_for(3 * kDeadline);
    const auto begin = std::chrono::steady_clock::now();
    const auto failure = failure_of([&] { save_known_step(folder.path(), {2, 0}, group); });
    TORCH_CHECK(!failure.empty(), "rank ", group->rank(), " has saved without the others");
    TORCH_CHECK(std::chrono::steady_clock::now() - begin < 20 * kDeadline, failure);
  };
  run_ranks(3, save_late, kDeadline);
  EXPECT_EQ(load_known_step(folder.path(), nullptr), (Mark{1, 0}));
}

}  // namespace
}  // namespace megashard::testing
