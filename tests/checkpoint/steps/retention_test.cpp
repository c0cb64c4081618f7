#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/steps/checkpoint_directory.h"
#include "checkpoint/steps/retention.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

class RetentionTest : public ::testing::Test {
 protected:
  RetentionTest() {
    auto release = StepWriter::release(directory_.path());
    release.begin();
    release.commit({});
    for (int iteration = 10; iteration <= 60; iteration += 10) {
      StepWriter step(directory_.path(), iteration);
      step.begin();
      step.commit({});
    }
  }

  /// Iterations, newest first; -1 for release.
  std::vector<int64_t> left() const {
    std::vector<int64_t> iterations;
    for (const auto& step : list_steps(directory_.path())) iterations.push_back(step.is_release ? -1 : step.iteration);
    return iterations;
  }
  void damage(const std::string& step) const { std::filesystem::remove(directory_.file(step + "/manifest.json")); }

  TemporaryFolder directory_;
};

TEST_F(RetentionTest, TheNewestAndTheMultiplesStay) {
  const auto& path = directory_.path();
  remove_old_steps(path, 60, {});
  EXPECT_EQ(left().size(), 7U);
  remove_old_steps(path, 60, {.most_recent = 3, .interval = 20});
  EXPECT_THAT(left(), ElementsAre(60, 50, 40, 20, -1));
  remove_old_steps(path, 60, {.interval = 20});
  EXPECT_THAT(left(), ElementsAre(60, 40, 20, -1));
  remove_old_steps(path, 60, {.most_recent = 1});
  EXPECT_THAT(left(), ElementsAre(60, -1));
}

TEST_F(RetentionTest, StepsAfterTheNewOneAreNotOurs) {
  remove_old_steps(directory_.path(), 40, {.most_recent = 2});
  EXPECT_THAT(left(), ElementsAre(60, 50, 40, 30, -1));
}

TEST_F(RetentionTest, StepsThatAreKnownToBeDamagedDoNotCount) {
  remove_old_steps(directory_.path(), 60, {.most_recent = 2, .damaged = {50, 40}});
  EXPECT_THAT(left(), ElementsAre(60, 30, -1));  // the run was resumed from 30
}

TEST_F(RetentionTest, DamagedStepsDoNotCountAndNothingGoesForTheSakeOfOne) {
  damage("iter_0000050");
  remove_old_steps(directory_.path(), 60, {.most_recent = 2});
  EXPECT_THAT(left(), ElementsAre(60, 40, -1));
  damage("iter_0000060");
  EXPECT_THAT(message_of([&] { remove_old_steps(directory_.path(), 60, {.most_recent = 1}); }),
              HasSubstr("iter_0000060 has no .metadata"));
  EXPECT_THAT(left(), ElementsAre(60, 40, -1));
}

using ::testing::HasSubstr;
using testing::message_of;

class BestStepTest : public ::testing::Test {
 protected:
  BestStepTest() {
    for (int iteration = 10; iteration <= 40; iteration += 10) {
      StepWriter step(directory_.path(), iteration);
      step.begin();
      step.commit({});
    }
  }
  std::vector<int64_t> left() const {
    std::vector<int64_t> iterations;
    for (const auto& step : list_steps(directory_.path())) iterations.push_back(step.iteration);
    return iterations;
  }
  TemporaryFolder directory_;
};

TEST_F(BestStepTest, IsReadAsItWasMarked) {
  EXPECT_FALSE(read_best_step(directory_.path()));
  mark_best_step(directory_.path(), {20, 0.1});
  mark_best_step(directory_.path(), {30, 1.0 / 3});
  EXPECT_EQ(read_best_step(directory_.path())->iteration, 30);
  EXPECT_EQ(read_best_step(directory_.path())->validation_loss, 1.0 / 3);
  unmark_best_step(directory_.path());
  EXPECT_FALSE(read_best_step(directory_.path()));
}

TEST_F(BestStepTest, StaysWhenOldStepsAreRemoved) {
  mark_best_step(directory_.path(), {20, 0.1});
  remove_old_steps(directory_.path(), 40, {.most_recent = 2});
  EXPECT_THAT(left(), ::testing::ElementsAre(40, 30, 20));
  mark_best_step(directory_.path(), {30, 0.05});
  remove_old_steps(directory_.path(), 40, {.most_recent = 1});
  EXPECT_THAT(left(), ::testing::ElementsAre(40, 30)) << "the one before it goes";
}

TEST_F(BestStepTest, OfARecentOneNoOtherStaysForIt) {
  mark_best_step(directory_.path(), {30, 0.1});
  remove_old_steps(directory_.path(), 40, {.most_recent = 2});
  EXPECT_THAT(left(), ::testing::ElementsAre(40, 30));
}

TEST_F(BestStepTest, AnIllegibleMarkRemovesNothing) {
  std::ofstream(directory_.file("best_checkpoint.json")) << "20";
  EXPECT_THAT(message_of([&] { remove_old_steps(directory_.path(), 40, {.most_recent = 1}); }),
              HasSubstr("best_checkpoint.json does not hold the iteration"));
  EXPECT_EQ(left().size(), 4u);
}

TEST_F(BestStepTest, IsFoundByAWord) {
  const auto word = directory_.file("best");
  EXPECT_THAT(message_of([&] { resolve_best_step(word); }), HasSubstr("train with --save-best"));
  mark_best_step(directory_.path(), {20, 0.1});
  EXPECT_EQ(resolve_best_step(word), directory_.file("iter_0000020"));
  EXPECT_EQ(resolve_best_step(word + "/"), directory_.file("iter_0000020"));
  EXPECT_EQ(resolve_best_step(directory_.path()), directory_.path());
  mark_best_step(directory_.path(), {25, 0.1});
  EXPECT_THAT(message_of([&] { resolve_best_step(word); }), HasSubstr("names iteration 25, which is not there any"));
  std::filesystem::create_directory(word);
  EXPECT_EQ(resolve_best_step(word), word) << "a folder of that name";
}

}  // namespace

}  // namespace megashard
