#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "framework/arguments/arguments.h"
#include "launch/output/short_text.h"
#include "launch/output/status_line.h"

namespace megashard {
namespace {

StepReport report_of(const Arguments& arguments) {
  return {.arguments = arguments,
          .iteration = 30,
          .train_iters = 40,
          .global_batch_size = 8,
          .seq_length = 1024,
          .seconds = 0.5,
          .flops = 1e12,
          .peak_tflops = 4,
          .step = {.loss = 4.08921, .measures = {512.0 * (1 << 20), 1e-4}}};
}

const Terminal kWide{.is_there = true, .has_colors = false, .columns = 200};

TEST(StatusLine, TellsTheStepAndTheTimeToGo) {
  const Arguments arguments;
  EXPECT_EQ(status_text(report_of(arguments), 60, kWide),
            "step 30/40  ETA 10 min  loss 4.089  16.38k tokens/s  MFU 50.0 %  512.0 MiB  data 100 us");
  auto without_peak = report_of(arguments);
  without_peak.peak_tflops.reset();
  EXPECT_EQ(status_text(without_peak, 60, kWide),
            "step 30/40  ETA 10 min  loss 4.089  16.38k tokens/s  512.0 MiB  data 100 us");
}

TEST(StatusLine, LeavesOutWhatDoesNotFit) {
  const Arguments arguments;
  const auto text = [&](int columns) {
    return status_text(report_of(arguments), 60, {.is_there = true, .columns = columns});
  };
  EXPECT_EQ(text(35), "step 30/40  ETA 10 min  loss 4.089") << "the last column is free";
  EXPECT_EQ(text(34), "step 30/40  ETA 10 min");
  EXPECT_EQ(text(5), "");
}

TEST(StatusLine, AlarmsAreRed) {
  const Arguments arguments;
  auto report = report_of(arguments);
  report.step.loss = std::numeric_limits<double>::quiet_NaN();
  report.step.measures[1] = 0.2;
  const auto text = status_text(report, 1, {.is_there = true, .has_colors = true, .columns = 200});
  EXPECT_NE(text.find("\033[1mstep 30/40\033[0m"), text.npos);
  EXPECT_NE(text.find("\033[31mloss is no number\033[0m"), text.npos);
  EXPECT_NE(text.find("\033[31mdata 200.0 ms\033[0m"), text.npos) << "more than a tenth of a step";
  EXPECT_EQ(status_text(report, 1, kWide).find('\033'), std::string::npos);
}

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

TEST(ShortText, NumbersHaveFourDigits) {
  EXPECT_EQ(short_number(4.08921217918396), "4.089");
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(8.154e-7), "8.154e-07");
  EXPECT_EQ(short_number(9999), "9999");
  EXPECT_EQ(short_number(448501.5), "448.5k");
  EXPECT_EQ(short_number(-2e9), "-2G");
  EXPECT_EQ(short_number(std::numeric_limits<double>::quiet_NaN()), "-");
}

TEST(ShortText, BytesAndTimesHaveUnits) {
  EXPECT_EQ(byte_text(239050752), "228.0 MiB");
  EXPECT_EQ(byte_text(2048), "0.002 MiB");
  EXPECT_EQ(byte_text(0), "0 MiB");
  EXPECT_EQ(percent_text(0.4123), "41.2 %");
  EXPECT_EQ(byte_text(3.5 * (1 << 30)), "3.50 GiB");
  EXPECT_EQ(duration_text(0), "0.0 ms");
  EXPECT_EQ(duration_text(60e-6), "60 us");
  EXPECT_EQ(duration_text(1.5e-6), "1.5 us");
  EXPECT_EQ(duration_text(0.0416), "41.6 ms");
  EXPECT_EQ(duration_text(119), "119.0 s");
  EXPECT_EQ(duration_text(300), "5 min");
  EXPECT_EQ(duration_text(7500), "2 h 05 min");
}

}  // namespace

}  // namespace megashard
