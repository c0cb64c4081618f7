#include "checkpoint/steps/find_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/files/output_file.h"
#include "checkpoint/steps/checkpoint_directory.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

/// Steps 10, 20 and 30 with two files each.
class FindStepTest : public ::testing::Test {
 protected:
  FindStepTest() {
    for (const int iteration : {10, 20, 30}) save(iteration);
  }

  void save(int64_t iteration) const {
    StepWriter step(directory_.path(), iteration);
    step.begin();
    std::vector<WrittenFile> files;
    for (const char* name : {"__0_0.distcp", "__1_0.distcp"}) {
      OutputFile file(step.folder() + "/" + name);
      file.write(std::string(2000, static_cast<char>(iteration)));
      files.push_back(file.sync_and_close());
    }
    step.commit(files);
  }

  std::string file(const std::string& name) const { return directory_.file(name); }
  void set_tracker(const std::string& text) const { std::ofstream(file("latest_checkpointed_iteration.txt")) << text; }
  void damage(const std::string& step) const { std::filesystem::resize_file(file(step + "/__1_0.distcp"), 1000); }

  /// The iteration found, or -1. Sets `line_` to the message.
  int64_t find(FindOptions options = {}, const ProcessGroupPtr& group = nullptr) {
    line_.clear();
    options.notice = [this](const std::string& line) { line_ = line; };
    const auto step = find_step(directory_.path(), group, options);
    return step ? step->iteration : -1;
  }

  TemporaryFolder directory_;
  std::string line_;
};

TEST_F(FindStepTest, TheTrackersStepIsTakenInSilence) {
  EXPECT_EQ(find(), 30);
  set_tracker("20\n");  // the user has set it back on purpose
  EXPECT_EQ(find(), 20);
  EXPECT_EQ(find({.ckpt_step = 10}), 10);
  EXPECT_EQ(line_, "");
}

TEST_F(FindStepTest, DamagedStepsAreNamedAndPassedOver) {
  damage("iter_0000030");
  EXPECT_EQ(find(), 20);
  EXPECT_EQ(line_, file("iter_0000030/__1_0.distcp") +
                       " has 1000 bytes instead of 2000: it was cut short or replaced; " + file("iter_0000020") +
                       " is used instead");
  std::filesystem::remove(file("iter_0000020/manifest.json"));  // there is no .metadata either
  EXPECT_EQ(find(), 10);
  EXPECT_THAT(line_, HasSubstr("; " + file("iter_0000020") + " has no .metadata"));
  EXPECT_THAT(line_, HasSubstr(file("iter_0000010") + " is used instead"));
  std::filesystem::remove(file("iter_0000010/__0_0.distcp"));
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("has no whole step to use instead"));
}

TEST_F(FindStepTest, ChangedBytesAreFound) {
  std::ofstream(file("iter_0000030/__1_0.distcp")) << std::string(2000, 'x');
  EXPECT_EQ(find({.depth = VerifyDepth::kSizes}), 30);
  EXPECT_EQ(find(), 20);
  EXPECT_THAT(line_, StartsWith(file("iter_0000030/__1_0.distcp") + " has the checksum"));
  EXPECT_THAT(line_, EndsWith(file("iter_0000020") + " is used instead"));
  EXPECT_THAT(find_step(directory_.path(), nullptr)->passed_over, ElementsAre(30));
}

TEST_F(FindStepTest, EveryByteIsReadByOneOfTheRanks) {
  const auto path = file("iter_0000030/__0_0.distcp");
  for (const int ranks : {1, 3, 4}) {
    testing::run_ranks(ranks, [&](const ProcessGroupPtr& group) {
      TORCH_CHECK(find_step(directory_.path(), group)->iteration == 30);
    });
    for (const int64_t byte : {0, 999, 1000, 1333, 1334, 1999}) {
      std::string content(2000, static_cast<char>(30));
      content[static_cast<size_t>(byte)] = 'x';
      std::ofstream(path) << content;
      testing::run_ranks(ranks, [&](const ProcessGroupPtr& group) {
        std::string line;
        const auto step =
            find_step(directory_.path(), group, {.notice = [&](const std::string& said) { line = said; }});
        TORCH_CHECK(step->iteration == 20 && line.find(path + " has the checksum") == 0, byte, " ", line);
      });
      std::ofstream(path) << std::string(2000, static_cast<char>(30));
    }
  }
}

TEST_F(FindStepTest, ATrackerThatIsTornOrAwayIsSaid) {
  set_tracker("3\x01");
  EXPECT_EQ(find(), 30);
  EXPECT_THAT(line_, HasSubstr("latest_checkpointed_iteration.txt should hold an iteration"));
  EXPECT_THAT(line_, HasSubstr(file("iter_0000030") + " is used instead"));
  set_tracker("");
  EXPECT_EQ(find(), 30);
  std::filesystem::remove(file("latest_checkpointed_iteration.txt"));
  damage("iter_0000030");
  EXPECT_EQ(find(), 20);
  EXPECT_THAT(line_, StartsWith(directory_.path() + " has steps, but no latest_checkpointed"));
  set_tracker("25");
  EXPECT_EQ(find(), 20);
  EXPECT_THAT(line_, StartsWith("there is no " + file("iter_0000025") + ", which the tracker names"));
  set_tracker("5");
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("nor a step before it"));
  set_tracker("release");
  EXPECT_THAT(message_of([&] { find(); }), HasSubstr("there is no " + file("release")));
}

TEST_F(FindStepTest, AStepThatWasAskedForIsNotReplacedByAnother) {
  damage("iter_0000020");
  const auto refused = message_of([&] { find({.ckpt_step = 20}); });
  EXPECT_THAT(refused, StartsWith("--ckpt-step 20: " + file("iter_0000020/__1_0.distcp")));
  EXPECT_THAT(refused, HasSubstr("or name another step"));
  EXPECT_THAT(message_of([&] { find({.ckpt_step = 15}); }),
              HasSubstr("it has iter_0000010, iter_0000020, iter_0000030"));
}

TEST_F(FindStepTest, AFirstStartHasNothing) {
  for (const char* step : {"iter_0000010", "iter_0000020", "iter_0000030"}) std::filesystem::remove_all(file(step));
  std::filesystem::remove(file("latest_checkpointed_iteration.txt"));
  std::filesystem::create_directory(file(".iter_0000040.tmp"));
  EXPECT_EQ(find(), -1);
  EXPECT_FALSE(find_step(file("nowhere"), nullptr).has_value());
}

TEST_F(FindStepTest, AStepIsFoundWhileItsReplacementIsCutShort) {
  std::filesystem::rename(file("iter_0000030"), file(".iter_0000030.old"));
  const auto step = find_step(directory_.path(), nullptr);
  EXPECT_EQ(step->folder, file(".iter_0000030.old"));
  save(40);  // sets the tracker again
  EXPECT_EQ(find({.ckpt_step = 30}), 30);
  EXPECT_TRUE(std::filesystem::exists(file("iter_0000030")));
  std::filesystem::create_directory(file(".iter_0000030.old"));
  save(50);
  EXPECT_FALSE(std::filesystem::exists(file(".iter_0000030.old")));
}

TEST_F(FindStepTest, RanksShareTheWorkAndAgree) {
  damage("iter_0000030");  // a file that the second rank checks
  testing::run_ranks(3, [&](const ProcessGroupPtr& group) {
    std::string line;
    const auto step = find_step(directory_.path(), group, {.notice = [&](const std::string& said) { line = said; }});
    TORCH_CHECK(step->iteration == 20 && line.find("1000 bytes instead of 2000") != std::string::npos, line);
    const auto refused = message_of([&] { find_step(directory_.path(), group, {.ckpt_step = 30}); });
    TORCH_CHECK(refused.find("--ckpt-step 30: ") == 0, refused);
  });
}

TEST_F(FindStepTest, RanksWithADiskOfTheirOwnAgree) {
  const TemporaryFolder other;  // the same steps; one has other bytes
  std::filesystem::copy(directory_.path(), other.path(), std::filesystem::copy_options::recursive);
  std::fstream(other.file("iter_0000030/__1_0.distcp"), std::ios::in | std::ios::out) << "changed";
  testing::run_ranks(2, [&](const ProcessGroupPtr& group) {
    const auto& mine = group->rank() == 0 ? directory_ : other;
    const auto step = find_step(mine.path(), group);
    TORCH_CHECK(step->iteration == 20 && step->folder == mine.file("iter_0000020"), step->folder);
  });
}

TEST_F(FindStepTest, APathMayHoldLineBreaks) {
  const auto odd = file("two\nlines");
  std::filesystem::create_directory(odd);
  for (const char* name : {"iter_0000020", "iter_0000030", "latest_checkpointed_iteration.txt"}) {
    std::filesystem::copy(file(name), odd + "/" + name, std::filesystem::copy_options::recursive);
  }
  EXPECT_EQ(find_step(odd, nullptr)->folder, odd + "/iter_0000030");
}

}  // namespace
}  // namespace megashard
