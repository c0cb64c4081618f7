#include "framework/training/metrics_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

TEST(MetricsLine, KeepsFullPrecision) {
  const double third = 1.0 / 3.0, tiny = 4.9406564584124654e-324;
  const auto line = metrics_line({.step = 3, .loss = third, .grad_norm = tiny, .lr = 1e-3});
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
  const auto json =
      nlohmann::json::parse(metrics_line({.loss = std::numeric_limits<double>::quiet_NaN()}));
  EXPECT_TRUE(json["loss"].is_null());
}

TEST(MetricsFile, WritesALineAStepAndGoesOn) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "megashard_metrics_file_test";
  const auto path = (folder / "deep" / "run.jsonl").string();
  const auto lines = [&path] {
    std::ifstream file(path);
    int count = 0;
    for (std::string line; std::getline(file, line); ++count)
      EXPECT_TRUE(nlohmann::json::accept(line));
    return count;
  };
  MetricsFile first(path, MetricsFile::Mode::kNew);
  first.write({.step = 1});
  EXPECT_EQ(lines(), 1) << "each line can be read at once";
  MetricsFile(path, MetricsFile::Mode::kAppend).write({.step = 2});
  EXPECT_EQ(lines(), 2);
  MetricsFile(path, MetricsFile::Mode::kNew).write({.step = 1});
  EXPECT_EQ(lines(), 1);
  EXPECT_THAT(usage_error([&] { MetricsFile(path + "/under/a/file", MetricsFile::Mode::kNew); }),
              testing::HasSubstr("cannot be written"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace megashard
