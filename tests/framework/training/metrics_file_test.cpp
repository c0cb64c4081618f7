#include "framework/training/metrics_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

StepReport report_of(int64_t step, double loss = 0) {
  return {.iteration = step, .seconds = 1, .step = {.loss = loss}};
}

TEST(MetricsLine, HasItsKeysInOneOrder) {
  auto report = report_of(3, 1.5);
  report.consumed_samples = 48;
  report.global_batch_size = 16;
  report.seq_length = 8;
  report.seconds = 0.5;
  report.lr = 1e-3;
  report.peak_tflops = 4;
  report.flops = 1e12;
  report.step.measures = {1024, 0.25};
  report.step.grad_norm = 2.5;
  report.zeros_in_grad = 12;
  report.params_norm = 7.5;
  report.validation_loss = 1.25;
  EXPECT_EQ(metrics_line(report),
            "{\"step\":3,\"loss\":1.5,\"grad_norm\":2.5,\"lr\":0.001,\"tokens_per_s\":256.0,\"mfu\":0.5,"
            "\"peak_memory_bytes\":1024,\"data_wait_s\":0.25,\"step_s\":0.5,\"consumed_samples\":48,"
            "\"global_batch_size\":16,\"zeros_in_grad\":12.0,\"params_norm\":7.5,\"validation_loss\":1.25}");
}

TEST(Metrics, OfRanksAreReduced) {
  std::vector<double> all;
  reduce_metrics(all, measured_metrics({.data_wait_seconds = 3, .peak_memory_bytes = 10}));
  reduce_metrics(all, measured_metrics({.data_wait_seconds = 2, .peak_memory_bytes = 30}));
  auto report = report_of(1);
  report.step.measures = all;
  const auto json = nlohmann::json::parse(metrics_line(report));
  EXPECT_EQ(json["data_wait_s"], 3);
  EXPECT_EQ(json["peak_memory_bytes"], 30);
}

TEST(MetricsLine, KeepsFullPrecision) {
  const double third = 1.0 / 3.0, tiny = 4.9406564584124654e-324;
  auto report = report_of(3, third);
  report.step.grad_norm = tiny;
  const auto line = metrics_line(report);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["loss"].get<double>(), third);
  EXPECT_EQ(json["grad_norm"].get<double>(), tiny);
  EXPECT_FALSE(json.contains("mfu"));
  EXPECT_TRUE(line.starts_with("{\"step\":3,\"loss\":0.3333333333333333,"))
      << "the shortest form that reads back equal";
  EXPECT_EQ(line.find('\n'), line.npos);
}

TEST(MetricsLine, WritesNullForWhatIsNotFinite) {
  const auto json = nlohmann::json::parse(metrics_line(report_of(1, std::numeric_limits<double>::quiet_NaN())));
  EXPECT_TRUE(json["loss"].is_null());
}

TEST(MetricsFile, WritesALineAStepAndGoesOn) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "megashard_metrics_file_test";
  const auto path = (folder / "deep" / "run.jsonl").string();
  const auto lines = [&path] {
    std::ifstream file(path);
    int count = 0;
    for (std::string line; std::getline(file, line); ++count) EXPECT_TRUE(nlohmann::json::accept(line));
    return count;
  };
  MetricsFile first(path, 0);
  first.write(report_of(1));
  EXPECT_EQ(lines(), 1) << "each line can be read at once";
  MetricsFile(path, 1).write(report_of(2));
  EXPECT_EQ(lines(), 2);
  MetricsFile(path, 0).write(report_of(1));
  EXPECT_EQ(lines(), 1);
  EXPECT_THAT(usage_error([&] { MetricsFile(path + "/under/a/file", 0); }), testing::HasSubstr("cannot be written"));
  std::filesystem::remove_all(folder);
}

TEST(MetricsFile, OfAnotherRunIsKept) {
  const TemporaryFolder folder;
  const auto path = folder.file("run.jsonl");
  const auto content = [](const std::string& file) {
    std::ifstream stream(file);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  EXPECT_EQ(keep_earlier_metrics(path), "");
  for (const char* run : {"first", "second"}) {
    std::ofstream(path) << run;
    std::ofstream(path + ".events") << run;
    EXPECT_NE(keep_earlier_metrics(path), "");
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_EQ(content(path + ".1"), "first");
  EXPECT_EQ(content(path + ".2"), "second");
  EXPECT_EQ(content(path + ".2.events"), "second");
  std::ofstream(path).flush();
  EXPECT_EQ(keep_earlier_metrics(path), "") << "nothing is in it";
}

TEST(MetricsFile, IsCutToTheStepThatIsLoaded) {
  const std::string one = "{\"step\":1}\n", two = "{\"step\":2}\n", note = "a note\n";
  const std::string three = "{\"step\":3}\n";
  EXPECT_EQ(lines_until(one + two + three, 2), one + two);
  EXPECT_EQ(lines_until(one + two, 5), one + two);
  EXPECT_EQ(lines_until(one + "{\"step\":2,\"lo", 2), one);
  EXPECT_EQ(lines_until(note + one + three, 1), note + one);
  const std::string again = "{\"step\":2,\"loss\":1}\n";  // as of a run that went on from 1
  EXPECT_EQ(lines_until(one + two + three + again, 2), one + again);
  EXPECT_EQ(lines_until("", 2), "");

  const TemporaryFolder folder;
  std::ofstream(folder.file("real")) << one + two + three;
  std::filesystem::create_symlink(folder.file("real"), folder.file("link"));
  MetricsFile(folder.file("link"), 2).write(report_of(3));
  std::ifstream file(folder.file("real"));
  std::string lines(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(lines.starts_with(one + two + "{\"step\":3,\"loss\"")) << lines;
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
}

}  // namespace
}  // namespace megashard
