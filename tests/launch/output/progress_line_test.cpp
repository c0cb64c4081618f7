#include "launch/output/progress_line.h"

#include <gtest/gtest.h>

#include <vector>

namespace megashard {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(ProgressLine, TellsHowMuchIsDoneHowFastAndWhatIsLeft) {
  EXPECT_EQ(progress_text({.name = "load", .done = 3 * kGiB, .total = 12 * kGiB}, 6),
            "load: 3.00 GiB of 12.00 GiB, 25.0 %, 512.0 MiB/s, 18.0 s left");
  EXPECT_EQ(progress_text({.name = "index", .done = 1 << 16, .total = 2000000, .unit = "samples"}, 2),
            "index: 65.54k of 2M samples, 3.3 %, 32.77k samples/s, 59.0 s left");
}

TEST(ProgressLine, HasNoRateBeforeThereIsOne) {
  EXPECT_EQ(progress_text({.name = "load", .done = 0, .total = kGiB}, 9), "load: 0 MiB of 1.00 GiB, 0.0 %");
  EXPECT_EQ(progress_text({.name = "load", .done = kGiB, .total = kGiB}, 0), "load: 1.00 GiB of 1.00 GiB, 100.0 %");
  EXPECT_EQ(progress_text({.name = "load", .done = kGiB, .total = kGiB}, 1),
            "load: 1.00 GiB of 1.00 GiB, 100.0 %, 1.00 GiB/s");
}

TEST(ProgressLine, WithoutATerminalALineNowAndThen) {
  std::vector<std::string> lines;
  const auto work = [&](std::chrono::milliseconds interval) {
    lines.clear();
    const ProgressLine progress([&](const std::string& line) { lines.push_back(line); },
                                {.terminal = std::chrono::milliseconds(0), .log = interval});
    LongWork load("load", 2 * kGiB);
    load.add(kGiB);
    const LongWork nothing("check", 0);
  };
  work(std::chrono::milliseconds(0));
  ASSERT_EQ(lines.size(), 2U) << "at its begin and after each part; the end says nothing";
  EXPECT_EQ(lines[1].substr(0, 34), "load: 1.00 GiB of 2.00 GiB, 50.0 %");
  work(std::chrono::hours(1));
  EXPECT_TRUE(lines.empty());
}

}  // namespace
}  // namespace megashard
