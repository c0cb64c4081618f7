// Saves in which each change of the disk fails once, or is the last one: an error, a kill, a power cut.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "checkpoint/hugging_face/hf_files.h"
#include "checkpoint/hugging_face/hf_weights.h"
#include "checkpoint/hugging_face/save_hf_sharded.h"
#include "checkpoint/steps/manifest.h"
#include "parallel/collectives/agreement.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/faults/failing_io.h"
#include "tests/faults/known_step.h"
#include "tests/support/run_ranks.h"

namespace megashard::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

/// The error of the call; empty if there is none.
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

/// How a step is saved.
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
  FailingDisk::Loss loss = FailingDisk::Loss::kEntries;
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) { return out << scenario.name; }
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
const Manner kTorchDistBesideTraining{"TorchDistBesideTraining", CheckpointFormat::kTorchDist, true};
const Trouble kTroubles[] = {
    {"NoSpace", ENOSPC},      {"BadDisk", EIO},      {"ShortWrite", 0},
    {"ShortWrites", 0, true}, {"Killed", EIO, true}, {"PowerCut", EIO, true, true},
};

void save_in_manner(const Manner& manner, const std::string& directory, Mark mark, const ProcessGroupPtr& group,
                    const RetentionPolicy& retention = {}) {
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

  /// Fails the call after `calls` others. Returns false if the save makes fewer calls.
  bool save_with_failure(FailingDisk& disk, const std::string& directory, int64_t calls) const {
    if (scenario().without_exchange) disk.refuse_exchange();
    std::optional<Mark> before;
    for (const auto& mark : scenario().before) {
      save_known_step(directory, mark, nullptr, {.retention = scenario().retention});
      before = mark;
    }
    disk.fail_after(calls, trouble().error, trouble().for_good);
    const auto failure =
        failure_of([&] { save_in_manner(manner(), directory, scenario().now, nullptr, scenario().retention); });
    const bool failed = disk.has_failed();
    if (trouble().power_cut) disk.lose_power();  // also after a successful save
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
      for (const auto& step : list_steps(directory)) EXPECT_EQ(step_damage(step.folder, VerifyDepth::kBytes), "");
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
  return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name + std::get<2>(info.param).name;
};
using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;
INSTANTIATE_TEST_SUITE_P(KindsOfSave, FaultTest, Combine(ValuesIn(kScenarios), ValuesIn(kTroubles), Values(kTorchDcp)),
                         kNameOfFault);
INSTANTIATE_TEST_SUITE_P(Manners, FaultTest,
                         Combine(Values(kScenarios[2]), ValuesIn(kTroubles),
                                 Values(kTorchDist, kTorchDcpBesideTraining, kTorchDistBesideTraining)),
                         kNameOfFault);
INSTANTIATE_TEST_SUITE_P(LargeFiles, FaultTest,
                         Combine(Values(kLargeStep), ValuesIn(kTroubles), Values(kTorchDcp, kTorchDistBesideTraining)),
                         kNameOfFault);

class RanksFaultTest : public ::testing::TestWithParam<Manner> {
 protected:
  /// Saves `mark` over {1, 0}; each call fails once, in a separate save.
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
                         Values(kTorchDcp, kTorchDist, kTorchDcpBesideTraining, kTorchDistBesideTraining),
                         [](const auto& info) { return info.param.name; });

class LargeRanksFaultTest : public RanksFaultTest {};
TEST_P(LargeRanksFaultTest, AllGiveUpTogetherInTheSameWords) { expect_the_same_words(2, {5, 0}); }

INSTANTIATE_TEST_SUITE_P(Faults, LargeRanksFaultTest, Values(kTorchDcp, kTorchDistBesideTraining),
                         [](const auto& info) { return info.param.name; });

/// Saves a Hugging Face model over an earlier one, in files of at most so many bytes each.
struct HfScenario {
  const char* name;
  int64_t bytes_before;  ///< 0: there is no earlier one
  int64_t bytes_now;
};
struct HfWriter {
  const char* name;
  bool sharded;  ///< save_hf_sharded; otherwise save_hf_weights
};
std::ostream& operator<<(std::ostream& out, const HfScenario& scenario) { return out << scenario.name; }
std::ostream& operator<<(std::ostream& out, const HfWriter& writer) { return out << writer.name; }

constexpr int64_t kHfWeightBytes = 7 * 3 * 4;
const HfScenario kHfScenarios[] = {
    {"FirstFiles", 0, kHfWeightBytes},
    {"SameFiles", kHfWeightBytes, kHfWeightBytes},
    {"OneFileForMany", kHfWeightBytes, 3 * kHfWeightBytes},
    {"ManyFilesForOne", 3 * kHfWeightBytes, kHfWeightBytes},
    {"OneFile", 3 * kHfWeightBytes, 3 * kHfWeightBytes},
};
const HfWriter kHfSharded{"Sharded", true};
const HfWriter kHfWhole{"Whole", false};

/// Three weights filled with the generation's number, and a config.json with that number.
void save_hf_generation(const std::string& directory, int generation, int64_t file_bytes, const HfWriter& writer,
                        const ProcessGroupPtr& group = nullptr) {
  const auto whole = at::full({7, 3}, static_cast<double>(generation));
  const HfSaveOptions options{.max_shard_bytes = file_bytes, .beside = [generation](const std::string& folder) {
                                nlohmann::ordered_json config;
                                config["generation"] = generation;
                                write_hf_config(folder, config);
                              }};
  ShardedTensors tensors;
  std::vector<TensorInfo> infos;
  for (const char* name : {"a", "b", "c"}) {
    auto tensor = ShardedTensor::replicated(whole);
    const auto range = chunk_range(7, group == nullptr ? 1 : group->size(), rank_in(group));
    tensor.local = whole.narrow(0, range.offset, range.size);
    tensor.offsets[0] = range.offset;
    tensors.emplace_back(name, tensor);
    infos.push_back({name, at::kFloat, {7, 3}});
  }
  if (writer.sharded) return save_hf_sharded(directory, tensors, group, options);
  save_hf_weights(
      directory, infos, [&](const TensorInfo&) { return whole; }, options);
}

/// The generation of the model that readers find in the folder. nullopt if they refuse it, which must be because the
/// file is missing that they open first.
std::optional<int> find_hf_generation(const std::string& directory) {
  const auto refusal = failure_of([&] { open_hf_weights(directory); });
  if (!refusal.empty()) {
    EXPECT_THAT(refusal,
                AnyOf(HasSubstr("has neither model.safetensors nor"), HasSubstr("there is no Hugging Face directory")));
    return std::nullopt;
  }
  const bool both = std::filesystem::exists(directory + "/model.safetensors") &&
                    std::filesystem::exists(directory + "/model.safetensors.index.json");
  EXPECT_FALSE(both) << "transformers takes the one, and others the other";
  const int generation = need_hf_config(directory).at("generation").get<int>();
  const auto weights = open_hf_weights(directory);
  EXPECT_EQ(weights->tensors().size(), 3U);
  for (const auto& info : weights->tensors()) {
    const auto whole = at::full({7, 3}, static_cast<double>(generation));
    EXPECT_TRUE(at::equal(weights->read_tensor(info.name), whole)) << info.name << " is of another save";
  }
  return generation;
}

int64_t count_names(const std::string& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), {});
}

class HfFaultTest : public ::testing::TestWithParam<std::tuple<HfScenario, Trouble, HfWriter>> {};

TEST_P(HfFaultTest, TheFolderHoldsOneModelOrNone) {
  const auto& [scenario, trouble, writer] = GetParam();
  bool failed = true;
  int64_t calls = 0;
  for (; failed && !HasFailure(); ++calls) {
    SCOPED_TRACE("the call after " + std::to_string(calls));
    TemporaryFolder folder;
    const auto directory = folder.file("weights");
    FailingDisk disk(directory);
    if (scenario.bytes_before > 0) save_hf_generation(directory, 1, scenario.bytes_before, writer);
    disk.fail_after(calls, trouble.error, trouble.for_good);
    const auto failure = failure_of([&] { save_hf_generation(directory, 2, scenario.bytes_now, writer); });
    failed = disk.has_failed();
    if (trouble.power_cut) disk.lose_power(trouble.loss);
    disk.recover();

    const auto found = find_hf_generation(directory);
    if (!found && scenario.bytes_before > 0) {  // the new model is complete, but hidden
      EXPECT_TRUE(hf_save_was_cut_short(directory));
    }
    if (failure.empty()) {
      EXPECT_EQ(found, 2);
    } else {
      EXPECT_THAT(failure, HasSubstr(directory));
      EXPECT_THAT(failure, HasSubstr(std::strerror(trouble.error)));
      EXPECT_NE(trouble.error, 0) << "a short write is no failure: " << failure;
    }
    save_hf_generation(directory, 3, scenario.bytes_now, writer);
    EXPECT_EQ(find_hf_generation(directory), 3);
    const auto files = (3 * kHfWeightBytes + scenario.bytes_now - 1) / scenario.bytes_now;
    EXPECT_EQ(count_names(directory), 1 + files + (files > 1 ? 1 : 0));  // config.json, the index
  }
  EXPECT_GT(calls, 15);
}

const Trouble kEndsOfASave[] = {
    kTroubles[4], kTroubles[5], {"PowerCutBringsBack", EIO, true, true, FailingDisk::Loss::kRemovals}};
INSTANTIATE_TEST_SUITE_P(KindsOfSave, HfFaultTest,
                         Combine(ValuesIn(kHfScenarios), ValuesIn(kEndsOfASave), Values(kHfSharded)), kNameOfFault);
INSTANTIATE_TEST_SUITE_P(Whole, HfFaultTest, Combine(Values(kHfScenarios[1]), ValuesIn(kTroubles), Values(kHfWhole)),
                         kNameOfFault);

TEST(Faults, RanksThatWriteHuggingFaceFilesFailTogether) {
  for (const int error : {ENOSPC, EIO, 0}) {
    bool failed = true;
    for (int64_t calls = 0; failed; ++calls) {
      TemporaryFolder folder;
      const auto directory = folder.file("weights");
      FailingDisk disk(directory);
      save_hf_generation(directory, 1, kHfWeightBytes, kHfSharded);
      disk.fail_after(calls, error, false);
      std::vector<std::string> failures(2);
      run_ranks(2, [&](const ProcessGroupPtr& group) {
        failures[static_cast<size_t>(group->rank())] =
            failure_of([&] { save_hf_generation(directory, 2, kHfWeightBytes, kHfSharded, group); });
      });
      failed = disk.has_failed();
      disk.recover();
      ASSERT_EQ(failures[0], failures[1]) << calls;
      const auto found = find_hf_generation(directory);
      ASSERT_FALSE(HasFailure()) << failures[0];
      if (failures[0].empty()) {
        ASSERT_EQ(found, 2) << calls;
      } else {
        ASSERT_NE(error, 0) << failures[0];
        ASSERT_THAT(failures[0], HasSubstr(directory));
        ASSERT_THAT(failures[0], HasSubstr(std::strerror(error)));
      }
      // The hidden files are kept if there is no other model, and only then.
      if (found != 2) {
        ASSERT_EQ(hf_save_was_cut_short(directory), !found) << failures[0];
      }
    }
  }
}

TEST(Faults, AFolderThatCannotBeListedIsOnlyNoticedOnceTheStepIsThere) {
  bool failed = true;
  int noticed = 0;
  for (int listings = 0; failed; ++listings) {
    TemporaryFolder folder;
    const auto directory = folder.file("save");
    FailingDisk disk(directory);
    save_known_step(directory, {1, 0}, nullptr);
    disk.fail_listing_after(listings);
    std::vector<std::string> lines;
    const SaveOptions options{.retention = {.most_recent = 1},
                              .notice = [&](const std::string& line) { lines.push_back(line); }};
    const auto failure = failure_of([&] { save_known_step(directory, {2, 0}, nullptr, options); });
    failed = disk.has_failed();
    disk.recover();
    EXPECT_EQ(load_known_step(directory, nullptr), (failure.empty() ? Mark{2, 0} : Mark{1, 0}));
    if (!failure.empty()) {
      EXPECT_THAT(failure, HasSubstr("cannot list " + directory));
    } else if (failed) {
      ++noticed;
      ASSERT_EQ(lines.size(), 1U);
      EXPECT_THAT(lines[0], HasSubstr("old checkpoints are kept: cannot list " + directory));
    }
  }
  EXPECT_GE(noticed, 2);
}

TEST(Faults, AStepThatIsNotAsItWasWrittenIsPassedOver) {
  TemporaryFolder folder;
  const auto directory = folder.file("save");
  FailingDisk disk(directory);
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    save_known_step(directory, {1, 0}, group);
    group->barrier();
    if (group->rank() == 0) disk.spoil_writes("__1_0.distcp");
    group->barrier();
    save_known_step(directory, {2, 0}, group, {.retention = {.most_recent = 2}});
    std::string line;
    const FindOptions find{.notice = [&](const std::string& said) { line = said; }};
    EXPECT_EQ(load_known_step(directory, group, find), (Mark{1, 0}));
    EXPECT_THAT(line, HasSubstr("__1_0.distcp has the checksum"));
  });
}

TEST(Faults, WhatCannotBeReadNowIsNoReasonToTakeAnOlderStep) {
  using Reading = FailingDisk::Reading;
  TemporaryFolder folder;
  const auto directory = folder.file("save");
  for (const int iteration : {1, 2}) save_known_step(directory, {iteration, 0}, nullptr);
  int tried = 0;
  for (const char* name : {"iter_0000002/__0_0.distcp", "iter_0000002/.metadata", "iter_0000002/manifest.json",
                           "iter_0000002", "latest_checkpointed_iteration.txt", "save"}) {
    for (const auto call : {Reading::kStatus, Reading::kOpen, Reading::kRead}) {
      for (const int error : {EACCES, EIO, ESTALE, ENOMEM, EMFILE}) {
        FailingDisk disk(directory);
        disk.fail_reading(name, call, error);
        std::vector<std::string> failures(2);
        std::optional<Mark> found;
        run_ranks(2, [&](const ProcessGroupPtr& group) {
          const auto rank = static_cast<size_t>(group->rank());
          failures[rank] = failure_of([&] {
            const auto mark = load_known_step(directory, group);
            if (rank == 0) found = mark;
          });
        });
        SCOPED_TRACE(std::string(name) + ", " + std::strerror(error) + ", " + std::to_string(static_cast<int>(call)));
        ASSERT_EQ(failures[0], failures[1]);
        if (failures[0].empty()) {  // the load does not need that call
          ASSERT_EQ(found, (Mark{2, 0}));
          continue;
        }
        ++tried;
        ASSERT_THAT(failures[0], HasSubstr(std::strerror(error)));
        ASSERT_THAT(failures[0], HasSubstr("it may be whole, so nothing else is loaded instead"));
      }
    }
  }
  EXPECT_GE(tried, 5 * 9);
  EXPECT_EQ(load_known_step(directory, nullptr), (Mark{2, 0}));
}

TEST(Faults, ARankThatHangsEndsTheSaveOfTheOthers) {
  TemporaryFolder folder;
  save_known_step(folder.path(), {1, 0}, nullptr);
  constexpr auto kDeadline = std::chrono::milliseconds(1000);
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
