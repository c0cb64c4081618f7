#include "launch/report/reported_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "framework/diagnostics.h"
#include "tests/checkpoint/files/temporary_folder.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ReportedRunTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_.file(name)) << text; }
  std::string refusal(const std::string& path) const {
    try {
      read_run(path);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }
  TemporaryFolder folder_;
};

TEST_F(ReportedRunTest, HasTheNumbersOfItsSteps) {
  write("metrics.jsonl", "{\"step\":1,\"loss\":4.5}\n{\"step\":2,\"loss\":null,\"validation_loss\":3}\n{\"note\":1}\n");
  const auto run = read_run(folder_.path());
  EXPECT_THAT(run.steps, ElementsAre(1, 2));
  EXPECT_EQ(run.numbers.at("loss")[0], 4.5);
  EXPECT_TRUE(std::isnan(run.numbers.at("loss")[1]));
  EXPECT_TRUE(std::isnan(run.numbers.at("validation_loss")[0]));
  EXPECT_EQ(run.numbers.at("validation_loss")[1], 3);
  EXPECT_TRUE(run.starts.empty());
}

TEST_F(ReportedRunTest, LeavesOutALineThatIsNotWholeYet) {
  write("metrics.jsonl", "{\"step\":1,\"loss\":4.5}\n{\"step\":2,\"lo");
  EXPECT_THAT(read_run(folder_.path()).steps, ElementsAre(1));
}

TEST_F(ReportedRunTest, OfStepsDoneAgainTheLastOnesCount) {
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":2}\n{\"step\":3,\"loss\":3}\n{\"step\":2,\"loss\":9}\n");
  const auto run = read_run(folder_.path());
  EXPECT_THAT(run.steps, ElementsAre(1, 2));
  EXPECT_THAT(run.numbers.at("loss"), ElementsAre(1, 9));
}

TEST_F(ReportedRunTest, HasStartsMemoryAndTheEndFromTheEvents) {
  write("metrics.jsonl", "{\"step\":1}\n{\"step\":6}\n{\"step\":7}\n{\"step\":6}\n{\"step\":9}\n");
  write("metrics.jsonl.events",
        "{\"event\":\"start\",\"time\":\"now\",\"step\":0,\"world_size\":2,\"arguments\":{\"seed\":\"1\"}}\n"
        "{\"event\":\"memory\",\"step\":1,\"peak\":10,\"parts\":{\"gradients\":4}}\n"
        "{\"event\":\"memory\",\"step\":2,\"peak\":20,\"parts\":{\"gradients\":5}}\n"
        "{\"event\":\"save_failed\",\"time\":\"then\",\"step\":6,\"why\":\"the disk is full\"}\n"
        "{\"event\":\"end\",\"how\":\"exited\"}\n"
        "{\"event\":\"start\",\"time\":\"later\",\"step\":5,\"world_size\":4,\"arguments\":{\"seed\":\"2\"}}\n"
        "{\"event\":\"profile\",\"path\":\"/trace.json\"}\n"
        "{\"event\":\"of another version\"}\n{\"event\":\"me");
  const auto run = read_run(folder_.file("metrics.jsonl"));
  ASSERT_EQ(run.starts.size(), 2u);
  EXPECT_EQ(run.starts[1].step, 5);
  EXPECT_EQ(run.starts[1].world_size, 4);
  EXPECT_EQ(run.arguments.at("seed"), "2");
  EXPECT_EQ(run.memory.value().bytes, 20);
  EXPECT_THAT(run.memory->parts, ElementsAre(std::pair<std::string, int64_t>("gradients", 5)));
  EXPECT_THAT(run.traces, ElementsAre("/trace.json"));
  ASSERT_EQ(run.failed_saves.size(), 1u);
  EXPECT_EQ(run.failed_saves[0].time, "then");
  EXPECT_EQ(run.failed_saves[0].step, 6);
  EXPECT_EQ(run.failed_saves[0].why, "the disk is full");
  EXPECT_EQ(run.starts[0].end, "exited");
  EXPECT_EQ(run.starts[1].end, "");
  EXPECT_EQ(run.starts[0].last, 7) << "whose steps behind 5 were done again";
  EXPECT_EQ(run.starts[1].last, 9);
}

TEST_F(ReportedRunTest, ListsTheCheckpointsOfSave) {
  const auto step = folder_.file("saved/iter_0000010");
  std::filesystem::create_directories(step);
  write("saved/iter_0000010/data", "0123456789");
  write("saved/latest_checkpointed_iteration.txt", "10");
  write("metrics.jsonl", "{\"step\":10}\n");
  write("metrics.jsonl.events", "{\"event\":\"start\",\"folder\":\"/gone\",\"arguments\":{\"save\":\"runs/saved\"}}\n");
  const auto run = read_run(folder_.path());  // the folder may be moved
  ASSERT_EQ(run.checkpoints.size(), 1u);
  EXPECT_EQ(run.checkpoints[0].name, "iter_0000010");
  EXPECT_EQ(run.checkpoints[0].bytes, 10);
  EXPECT_TRUE(run.checkpoints[0].is_latest);
}

TEST_F(ReportedRunTest, SaysWhatIsWrongWithItsFiles) {
  EXPECT_THAT(refusal(folder_.file("gone")), HasSubstr("gone is not there; give the file of --metrics-file"));
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("has no metrics file (*.jsonl); train with --metrics-file"));
  write("a.jsonl", "");
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("has no step yet"));
  write("b.jsonl", "");
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("several .jsonl files"));
  write("metrics.jsonl", "{\"step\":1}\nstep 2\n");
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("metrics.jsonl:2 is no JSON object; a metrics file has one on each"));
}

}  // namespace
}  // namespace megashard
