#include "framework/training/training_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace megashard {
namespace {

using testing::HasSubstr;

constexpr const char* kTime = "2026-01-31 08:05:09";

StepReport plain_report() {
  return {.iteration = 10,
          .train_iters = 100,
          .consumed_samples = 80,
          .global_batch_size = 8,
          .seq_length = 16,
          .seconds = 1.5,
          .lr = 1e-4,
          .next_lr = 9.9e-5,
          .flops = 1e12,
          .step = {.loss = 4, .grad_norm = 1.23456, .measures = {812.34 * (1 << 20), 0.25}},
          .interval = {.loss_sum = 8.5, .losses = 2, .steps = 2, .samples = 16, .seconds = 2 * 1.23456}};
}

TEST(TrainingLogLine, IsMegatrons) {
  EXPECT_EQ(training_log_line(kTime, plain_report(), {}),
            " [2026-01-31 08:05:09] iteration       10/     100 | consumed samples:           80 | "
            "elapsed time per "
            "iteration (ms): 1234.6 | learning rate: 9.900000E-05 | global batch size:     8 | lm "
            "loss: 4.250000E+00 | "
            "loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   0 | number of "
            "nan iterations:   0 |");
}

TEST(TrainingLogLine, ShowsEveryOptionalPieceInItsPlace) {
  LoggingArguments log;
  log.log_throughput = log.log_tps = log.log_tokens_per_second = log.log_memory = true;
  auto report = plain_report();
  report.flops = 45.67e12 * 1.23456;
  report.interval.tokens_per_sample = 2 * 2048;
  report.zeros_in_grad = 12;
  report.params_norm = 100;
  report.interval.loss_sum = 4.25;
  report.interval.losses = report.interval.nan_steps = 1;
  EXPECT_EQ(training_log_line(kTime, report, log),
            " [2026-01-31 08:05:09] iteration       10/     100 | consumed samples:           80 | "
            "elapsed time per iteration (ms): 1234.6 | throughput per GPU "
            "(TFLOP/s/GPU): 45.7 | learning rate: "
            "9.900000E-05 | global batch size:     8 | lm loss: 4.250000E+00 | tokens per "
            "sample: 2.048000E+03 | loss scale: 1.0 | grad norm: 1.235 | num zeros: 12.0 | params "
            "norm: 100.000 | number "
            "of skipped iterations:   0 | number of nan iterations:   1 | "
            // What Megatron has not stands behind all that it has.
            "tokens per second: 103.7 | peak memory (MiB): 812.3 |");
}

TEST(TrainingLogLine, ShowsALossThatIsNoNumber) {
  auto report = plain_report();
  report.interval.losses = 0;
  report.interval.nan_steps = 2;
  EXPECT_THAT(training_log_line(kTime, report, {}), HasSubstr("| lm loss: NAN |"));
  report.interval = {.loss_sum = 0, .losses = 1, .steps = 1};
  EXPECT_THAT(training_log_line(kTime, report, {}), testing::Not(HasSubstr("lm loss"))) << "as Megatron";
}

TEST(TrainingLogLine, ShowsTheLossScaleAndWhatItSkipped) {
  auto report = plain_report();
  report.step.skipped = true;
  report.step.loss_scale = 65536;
  report.interval = {.loss_sum = 4, .losses = 1, .steps = 2, .samples = 16, .skipped_steps = 1, .seconds = 1};
  EXPECT_THAT(training_log_line(kTime, report, {}),
              HasSubstr("| lm loss: 4.000000E+00 | loss scale: 65536.0 | number of skipped iterations:   1 | number"));
  report.interval = {.steps = 2, .samples = 16, .skipped_steps = 2, .seconds = 1};
  EXPECT_THAT(training_log_line(kTime, report, {}), testing::Not(HasSubstr("lm loss"))) << "as Megatron";
}

TEST(TimerLogLines, AreMegatrons) {
  const PartTimes times = {{"forward-backward", {13.571, 12.344}}, {"optimizer", {0, 0}}, {"batch-generator", {1, 2}}};
  EXPECT_EQ(timer_log_lines(times, TimingLogOption::kMinMax),
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (12.34, 13.57)\n"
            "    batch-generator ................................: (1.00, 2.00)");
  EXPECT_EQ(timer_log_lines({times[0]}, TimingLogOption::kMax),
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 13.57");
  EXPECT_EQ(timer_log_lines(times, TimingLogOption::kAll),
            "times across ranks (ms):\n  forward-backward:\n     rank  0: 13.57\n     rank  1: 12.34\n"
            "  batch-generator:\n     rank  0: 1.00\n     rank  1: 2.00");
  EXPECT_EQ(timer_log_lines({times[1]}, TimingLogOption::kMinMax), "");
}

TEST(InterruptionLine, SaysWhereAndWhatIsSaved) {
  Interruption at{.iteration = 7, .train_iters = 20};
  EXPECT_EQ(interruption_line(at), "interrupted by SIGINT after iteration 7 of 20: nothing is saved, since there is no "
                                   "--save");
  at.save = "out";
  EXPECT_THAT(interruption_line(at), HasSubstr("7 of 20: nothing is saved in out yet"));
  at.saved_step = 5;
  at.in_evaluation = true;
  EXPECT_EQ(interruption_line(at),
            "interrupted by SIGINT in an evaluation after iteration 7 of 20: iteration 5 is saved "
            "in out; go on with --load out");
}

// Scripts take the step time by position: field 5 at ':', up to '|'.
TEST(TrainingLogLine, KeepsThePositionOfTheStepTime) {
  const auto line = training_log_line(kTime, plain_report(), {});
  size_t begin = 0;
  for (int field = 1; field < 5; ++field) begin = line.find(':', begin) + 1;
  EXPECT_EQ(line.substr(begin, line.find('|', begin) - begin), " 1234.6 ");
}

TEST(EvaluationLogLines, StandBetweenDashes) {
  const std::string text = " validation loss at iteration 10 | lm loss value: 0.000000E+00 | lm loss PPL: 1.000000E+00 "
                           "| ";
  const std::string dashes(94, '-');  // one more than the text has letters
  EXPECT_EQ(evaluation_log_lines("iteration 10", {{"lm loss", 0.0}}), dashes + "\n" + text + "\n" + dashes);
  EXPECT_THAT(evaluation_log_lines("iteration 10 on test set", {{"lm loss", 100.0}}),
              HasSubstr("at iteration 10 on test set | lm loss value: 1.000000E+02 | lm loss PPL: "
                        "4.851652E+08 | "))
      << "the exponent is at most 20";
  EXPECT_THAT(evaluation_log_lines("iteration 10", {{"dpo loss", 0.5}, {"accuracy", 1.0}}),
              HasSubstr("| dpo loss PPL: 1.648721E+00 | accuracy value: 1.000000E+00 | \n"));
}

TEST(LogLines, AreMegatrons) {
  EXPECT_EQ(saving_line(10, "out", "torch_dcp"), "saving checkpoint at iteration      10 to out in torch_dcp format");
  EXPECT_EQ(saved_line(10, "out"), "  successfully saved checkpoint from iteration      10 to out [ t 1/1, p 1/1 ]");
  EXPECT_EQ(best_line(40, 4.0206187),
            "  the best checkpoint so far is that of iteration      40, with the validation loss 4.020619E+00");
  EXPECT_EQ(loading_line("out", 10), " loading distributed checkpoint from out at iteration 10");
  EXPECT_EQ(loading_line("out", std::nullopt), " loading release checkpoint from out");
  EXPECT_EQ(loaded_line("out", 10), "  successfully loaded checkpoint from out [ t 1/1, p 1/1 ] at iteration 10");
  EXPECT_EQ(missing_checkpoint_lines("out/latest_checkpointed_iteration.txt", ""),
            "WARNING: could not find the metadata file out/latest_checkpointed_iteration.txt\n"
            "    will not load any checkpoints and will start from random");
  EXPECT_THAT(missing_checkpoint_lines("out/latest_checkpointed_iteration.txt", "--hf-model M"),
              testing::EndsWith("will not load any checkpoints from there; the weights come from "
                                "--hf-model M"));
  EXPECT_EQ(exit_line(10, "T"), "[exiting program at iteration 10] datetime: T ");
  EXPECT_EQ(evaluating_line(80), "Evaluating on 80 samples");
  EXPECT_EQ(evaluation_progress_line(3, 10), "Evaluating iter 3/10");
}

TEST(LogTime, IsIso) {
  std::tm time{};
  time.tm_year = 126;
  time.tm_mon = 0;
  time.tm_mday = 31;
  time.tm_hour = 8;
  time.tm_min = 5;
  time.tm_sec = 9;
  EXPECT_EQ(log_time(time), "2026-01-31 08:05:09");
}

}  // namespace
}  // namespace megashard
