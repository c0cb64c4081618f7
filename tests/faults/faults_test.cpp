// Saves whose every single change of the disk fails, or is the last: an error, a kill, a power cut.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/steps/agreement.h"
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

/// How a step is written.
struct Manner {
  const char* name;
  CheckpointFormat format;
  bool beside_training = false;
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
std::ostream& operator<<(std::ostream& out, const Manner& manner) { return out << manner.name; }
std::ostream& operator<<(std::ostream& out, const Trouble& trouble) { return out << trouble.name; }

const Scenario kScenarios[] = {
    {"FirstStep", {}, {1, 0}},
    {"NextStep", {{1, 0}}, {2, 0}},
    {"SameStep", {{1, 0}}, {1, 1}},
    {"SameStepWithoutExchange", {{1, 0}}, {1, 1}, {}, true},
    {"OldStepsGo", {{1, 0}, {2, 0}}, {3, 0}, {.most_recent = 2}},
};
const Scenario kLargeStep{"LargeStep", {{1, 0}}, {5, 0}};
const Manner kTorchDcp{"TorchDcp", CheckpointFormat::kTorchDcp};
const Manner kTorchDist{"TorchDist", CheckpointFormat::kTorchDist};
const Manner kTorchDcpBesideTraining{"TorchDcpBesideTraining", CheckpointFormat::kTorchDcp, true};
const Manner kTorchDistBesideTraining{"TorchDistBesideTraining", CheckpointFormat::kTorchDist,
                                      true};
const Trouble kTroubles[] = {
    {"NoSpace", ENOSPC},      {"BadDisk", EIO},      {"ShortWrite", 0},
    {"ShortWrites", 0, true}, {"Killed", EIO, true}, {"PowerCut", EIO, true, true},
};

void save_in_manner(const Manner& manner, const std::string& directory, Mark mark,
                    const ProcessGroupPtr& group, const RetentionPolicy& retention = {}) {
  const SaveOptions options{.format = manner.format, .retention = retention};
  if (!manner.beside_training) return save_known_step(directory, mark, group, options);
  AsyncSaver saver(group);
  save_known_step(directory, mark, group, options, &saver);
}

class FaultTest : public ::testing::TestWithParam<std::tuple<Scenario, Trouble, Manner>> {
 protected:
  const Scenario& scenario() const { return std::get<0>(GetParam()); }
  const Trouble& trouble() const { return std::get<1>(GetParam()); }
  const Manner& manner() const { return std::get<2>(GetParam()); }

  /// Fails the call after `calls` others; false when the save makes no more than that.
  bool save_with_failure(FailingDisk& disk, const std::string& directory, int64_t calls) const {
    if (scenario().without_exchange) disk.refuse_exchange();
    std::optional<Mark> before;
    for (const auto& mark : scenario().before) {
      save_known_step(directory, mark, nullptr, {.retention = scenario().retention});
      before = mark;
    }
    disk.fail_after(calls, trouble().error, trouble().for_good);
    const auto failure = failure_of([&] {
      save_in_manner(manner(), directory, scenario().now, nullptr, scenario().retention);
    });
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
      EXPECT_NE(trouble().error, 0) << "a short write is no failure: " << failure;
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

const auto kNameOfFault = [](const auto& info) {
  return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name +
         std::get<2>(info.param).name;
};
using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;
INSTANTIATE_TEST_SUITE_P(KindsOfSave, FaultTest,
                         Combine(ValuesIn(kScenarios), ValuesIn(kTroubles), Values(kTorchDcp)),
                         kNameOfFault);
INSTANTIATE_TEST_SUITE_P(Manners, FaultTest,
                         Combine(Values(kScenarios[2]), ValuesIn(kTroubles),
                                 Values(kTorchDist, kTorchDcpBesideTraining,
                                        kTorchDistBesideTraining)),
                         kNameOfFault);
INSTANTIATE_TEST_SUITE_P(LargeFiles, FaultTest,
                         Combine(Values(kLargeStep), ValuesIn(kTroubles),
                                 Values(kTorchDcp, kTorchDistBesideTraining)),
                         kNameOfFault);

class RanksFaultTest : public ::testing::TestWithParam<Manner> {
 protected:
  /// Saves `mark` over {1, 0}; each call fails once.
  static void expect_the_same_words(int ranks, Mark mark) {
    bool failed = true;
    for (int64_t calls = 0; failed; ++calls) {
      TemporaryFolder folder;
      const auto directory = folder.file("save");
      FailingDisk disk(directory);
      save_known_step(directory, {1, 0}, nullptr);
      disk.fail_after(calls, ENOSPC, false);
      std::vector<std::string> failures(static_cast<size_t>(ranks));
      run_ranks(ranks, [&](const ProcessGroupPtr& group) {
        failures[static_cast<size_t>(group->rank())] =
            failure_of([&] { save_in_manner(GetParam(), directory, mark, group); });
      });
      failed = disk.has_failed();
      disk.recover();
      ASSERT_EQ(failures[0].empty(), !failed) << calls;
      for (const auto& failure : failures) ASSERT_EQ(failures[0], failure);
      if (failed) {
        ASSERT_THAT(failures[0], HasSubstr(directory));
        ASSERT_THAT(failures[0], HasSubstr("No space left on device"));
      }
      const auto found = load_known_step(directory, nullptr, {.depth = VerifyDepth::kBytes});
      ASSERT_TRUE(found == mark || (failed && found == Mark{1, 0})) << failures[0];
    }
  }
};

TEST_P(RanksFaultTest, AllGiveUpTogetherInTheSameWords) { expect_the_same_words(3, {2, 0}); }

INSTANTIATE_TEST_SUITE_P(Faults, RanksFaultTest,
                         Values(kTorchDcp, kTorchDist, kTorchDcpBesideTraining,
                                kTorchDistBesideTraining),
                         [](const auto& info) { return info.param.name; });

class LargeRanksFaultTest : public RanksFaultTest {};
TEST_P(LargeRanksFaultTest, AllGiveUpTogetherInTheSameWords) { expect_the_same_words(2, {5, 0}); }

INSTANTIATE_TEST_SUITE_P(Faults, LargeRanksFaultTest, Values(kTorchDcp, kTorchDistBesideTraining),
                         [](const auto& info) { return info.param.name; });

/// A weight full of `value`, cut by rows.
ShardedTensors weight_of(double value, const ProcessGroupPtr& group) {
  const auto whole = at::full({7, 3}, value);
  auto tensor = ShardedTensor::replicated(whole);
  const auto range = chunk_range(7, group == nullptr ? 1 : group->size(), rank_in(group));
  tensor.local = whole.narrow(0, range.offset, range.size);
  tensor.offsets[0] = range.offset;
  return {{"w", tensor}};
}

TEST(Faults, HuggingFaceFilesOfAllRanksAreTheOldOrTheNewOnes) {
  for (const int error : {ENOSPC, EIO, 0}) {
    bool failed = true;
    for (int64_t calls = 0; failed; ++calls) {
      TemporaryFolder folder;
      const auto directory = folder.file("weights");
      FailingDisk disk(directory);
      save_hf_sharded(directory, weight_of(1, nullptr), nullptr);
      disk.fail_after(calls, error, false);
      std::vector<std::string> failures(2);
      run_ranks(2, [&](const ProcessGroupPtr& group) {
        failures[static_cast<size_t>(group->rank())] =
            failure_of([&] { save_hf_sharded(directory, weight_of(2, group), group); });
      });
      failed = disk.has_failed();
      disk.recover();
      ASSERT_EQ(failures[0], failures[1]) << calls;
      const auto found = HfWeights(directory).tensor("w");
      if (failures[0].empty()) {
        ASSERT_TRUE(at::equal(found, at::full({7, 3}, 2.0))) << calls;
      } else {
        ASSERT_NE(error, 0) << failures[0];
        ASSERT_THAT(failures[0], HasSubstr(directory));
        ASSERT_THAT(failures[0], HasSubstr(std::strerror(error)));
        ASSERT_TRUE(at::equal(found, at::full_like(found, found[0][0].item()))) << failures[0];
      }
      for (const auto& entry : std::filesystem::directory_iterator(directory))
        ASSERT_NE(entry.path().extension(), ".tmp") << failures[0];
    }
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
