#include "checkpoint/steps/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/steps/checkpoint_directory.h"
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

}  // namespace
}  // namespace megashard
