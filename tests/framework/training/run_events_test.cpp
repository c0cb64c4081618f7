#include "framework/training/run_events.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/checkpoint/files/temporary_folder.h"

namespace megashard {
namespace {

class RunEventsTest : public ::testing::Test {
 protected:
  RunEventsTest() { std::ofstream{metrics_}; }
  std::vector<nlohmann::json> lines() const {
    std::vector<nlohmann::json> all;
    std::ifstream file(events_path(metrics_));
    for (std::string line; std::getline(file, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }
  TemporaryFolder folder_;
  std::string metrics_ = folder_.path() + "/metrics.jsonl";
};

TEST_F(RunEventsTest, HasALineForEachEvent) {
  Arguments arguments;
  arguments.seed = 7;
  RunEvents events;
  events.open(metrics_, 0);
  events.start(arguments, {});
  events.memory({.iteration = 1, .bytes = 1024, .parts = {{"gradients", 512}}});
  events.profile("trace.json", 12);
  events.end("done", 20);
  const auto all = lines();
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0]["event"], "start");
  EXPECT_EQ(all[0]["arguments"], nlohmann::json({{"seed", "7"}})) << "others are at their defaults";
  EXPECT_EQ(all[1]["parts"]["gradients"], 512);
  EXPECT_EQ(all[2]["path"], (std::filesystem::current_path() / "trace.json").string());
  EXPECT_EQ(all[3]["how"], "done");
  EXPECT_EQ(all[3]["step"], 20);
}

TEST_F(RunEventsTest, ARunThatGoesOnAddsToThemAndAFreshOneDoesNot) {
  const auto start = [this](int64_t step) {
    RunEvents events;
    events.open(metrics_, step);
    events.start(Arguments(), {.step = step, .samples = 2 * step});
  };
  start(0);
  start(10);
  EXPECT_EQ(lines().size(), 2u);
  EXPECT_EQ(lines()[1]["arguments"], nlohmann::json({{"consumed_train_samples", "20"}}));
  start(0);
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(RunEventsTest, AreNotWrittenBesideADevice) {
  RunEvents beside_file, beside_device;
  beside_file.open(metrics_, 0);
  beside_device.open("/dev/null", 0);
  EXPECT_TRUE(beside_file.is_open());
  EXPECT_FALSE(beside_device.is_open());
  EXPECT_FALSE(std::filesystem::exists("/dev/null.events"));
}

}  // namespace
}  // namespace megashard
