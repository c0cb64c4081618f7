#include "launch/output/status_line.h"

#include <gtest/gtest.h>

#include <limits>

namespace megashard {
namespace {

StepReport report_of() {
  return {.iteration = 30,
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
  EXPECT_EQ(status_text(report_of(), 60, kWide),
            "step 30/40  ETA 10 min  loss 4.089  16.38k tokens/s  MFU 50.0 %  512.0 MiB  data 100 us");
  auto without_peak = report_of();
  without_peak.peak_tflops.reset();
  EXPECT_EQ(status_text(without_peak, 60, kWide),
            "step 30/40  ETA 10 min  loss 4.089  16.38k tokens/s  512.0 MiB  data 100 us");
}

TEST(StatusLine, LeavesOutWhatDoesNotFit) {
  const auto text = [&](int columns) { return status_text(report_of(), 60, {.is_there = true, .columns = columns}); };
  EXPECT_EQ(text(35), "step 30/40  ETA 10 min  loss 4.089") << "the last column is free";
  EXPECT_EQ(text(34), "step 30/40  ETA 10 min");
  EXPECT_EQ(text(5), "");
}

TEST(StatusLine, AlarmsAreRed) {
  auto report = report_of();
  report.step.loss = std::numeric_limits<double>::quiet_NaN();
  report.step.measures[1] = 0.2;
  const auto text = status_text(report, 1, {.is_there = true, .has_colors = true, .columns = 200});
  EXPECT_NE(text.find("\033[1mstep 30/40\033[0m"), text.npos);
  EXPECT_NE(text.find("\033[31mloss is no number\033[0m"), text.npos);
  EXPECT_NE(text.find("\033[31mdata 200.0 ms\033[0m"), text.npos) << "more than a tenth of a step";
  EXPECT_EQ(status_text(report, 1, kWide).find('\033'), std::string::npos);
}

}  // namespace
}  // namespace megashard
