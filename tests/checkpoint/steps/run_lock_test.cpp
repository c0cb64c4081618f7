#include "checkpoint/steps/run_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>

#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

TEST(RunLock, KeepsASecondRunOutUntilTheFirstIsGone) {
  const TemporaryFolder folder;
  const auto directory = folder.file("runs/a");
  auto first = std::make_unique<RunLock>(directory);
  EXPECT_TRUE(first->is_held());
  const auto refused = message_of([&] { RunLock second(directory); });
  EXPECT_THAT(refused, HasSubstr("--save " + directory + " is in use by another run (process " +
                                 std::to_string(::getpid()) + " on "));
  first.reset();
  EXPECT_FALSE(std::filesystem::exists(folder.file("runs"))) << "nothing was saved";
  EXPECT_TRUE(RunLock(directory).is_held());
}

TEST(RunLock, AFolderThatWasRemovedIsTakenAgain) {
  const TemporaryFolder folder;
  const auto directory = folder.file("a");
  RunLock lock(directory);
  EXPECT_FALSE(lock.take_again());
  std::filesystem::remove_all(directory);
  EXPECT_TRUE(lock.take_again());
  EXPECT_THAT(message_of([&] { RunLock second(directory); }), HasSubstr("is in use by another run"));
  std::filesystem::rename(directory, folder.file("b"));
  EXPECT_TRUE(lock.take_again());
  EXPECT_FALSE(lock.take_again());
}

TEST(RunLock, AFolderThatAnotherRunHasByNowStaysThatRuns) {
  const TemporaryFolder folder;
  const auto directory = folder.file("a");
  auto first = std::make_unique<RunLock>(directory);
  std::filesystem::remove_all(directory);
  auto second = std::make_unique<RunLock>(directory);
  for (int i = 0; i < 2; ++i)
    EXPECT_THAT(message_of([&] { first->take_again(); }),
                HasSubstr("--save " + directory + " is in use by another run"));
  first.reset();
  EXPECT_THAT(message_of([&] { RunLock third(directory); }), HasSubstr("is in use by another run"));
  first = std::make_unique<RunLock>(folder.file("c"));
  second.reset();
  EXPECT_FALSE(std::filesystem::exists(directory)) << "it goes with the run that has it";
}

TEST(RunLock, AKilledProcessHoldsNothing) {
  const TemporaryFolder folder;
  const pid_t other = ::fork();
  if (other == 0) {
    const RunLock lock(folder.path());
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  EXPECT_TRUE(std::filesystem::exists(folder.file(".run")));
  EXPECT_TRUE(RunLock(folder.path()).is_held());
  EXPECT_FALSE(std::filesystem::exists(folder.file(".run")));
  EXPECT_TRUE(std::filesystem::exists(folder.path())) << "it was there before";
}

TEST(RunLock, FoldersWithStepsStay) {
  const TemporaryFolder folder;
  {
    const RunLock lock(folder.file("a/b/c"));
    std::filesystem::create_directory(folder.file("a/b/iter_0000001"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.file("a/b/c")));
  EXPECT_TRUE(std::filesystem::exists(folder.file("a/b/iter_0000001")));
}

}  // namespace
}  // namespace megashard
