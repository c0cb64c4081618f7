#include "framework/arguments/microbatches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/diagnostics.h"

namespace megashard {
namespace {

using testing::HasSubstr;

TEST(Microbatches, AreConstantWithoutARamp) {
  Microbatches batches({.global_batch_size = 24, .micro_batch_size = 2, .data_parallel_size = 3});
  EXPECT_EQ(batches.count(), 4);
  batches.update(1'000'000);
  EXPECT_EQ(batches.count(), 4);
  EXPECT_EQ(batches.global_batch_size(), 24);
}

TEST(Microbatches, MustDivideOrShrink) {
  const MicrobatchOptions options{.global_batch_size = 25, .micro_batch_size = 2, .data_parallel_size = 3};
  EXPECT_THAT(usage_error([&] { Microbatches batches(options); }),
              HasSubstr("global batch size 25 is not divisible by 6"));
  auto shrinking = options;
  shrinking.decrease_if_needed = true;
  Microbatches batches(shrinking);
  EXPECT_EQ(batches.count(), 4);
  EXPECT_EQ(batches.global_batch_size(), 24);
}

// 8 to 32 by 8 over 600 samples: three increments of 200 samples.
TEST(Microbatches, GrowAlongARamp) {
  Microbatches batches(
      {.global_batch_size = 32, .micro_batch_size = 4, .data_parallel_size = 2, .rampup = {8, 8, 600}});
  EXPECT_EQ(batches.global_batch_size(), 8);
  EXPECT_EQ(batches.count(), 1);
  for (const auto& [consumed, expected] :
       {std::pair(199, 8), std::pair(200, 16), std::pair(399, 16), std::pair(400, 24), std::pair(599, 24),
        std::pair(600, 32), std::pair(601, 32)}) {
    batches.update(consumed);
    EXPECT_EQ(batches.global_batch_size(), expected) << consumed;
  }
  EXPECT_EQ(batches.count(), 4);
}

TEST(Microbatches, RefuseARampThatDoesNotFit) {
  const std::pair<std::vector<int64_t>, const char*> rows[] = {
      {{8, 5, 600}, "the growth from 8 to --global-batch-size 32 is not divisible by the increment"},
      {{40, 8, 600}, "must start at a positive batch of at most --global-batch-size 32"},
      {{0, 8, 600}, "must start at a positive batch"},
      {{8, 0, 600}, "grow by a positive increment"},
  };
  for (const auto& [ramp, message] : rows) {
    EXPECT_THAT(usage_error([&] { Microbatches batches({.global_batch_size = 32, .rampup = ramp}); }),
                HasSubstr(message));
  }
}

TEST(Microbatches, RefuseBatchesOfTheRampThatAreStillToCome) {
  const MicrobatchOptions options{.global_batch_size = 32, .micro_batch_size = 8, .rampup = {8, 4, 600}};
  EXPECT_THAT(usage_error([&] { Microbatches batches(options); }),
              HasSubstr("global batch size 12 is not divisible by 8"));
  EXPECT_THAT(usage_error([&] { Microbatches batches(options, 500); }),
              HasSubstr("global batch size 28 is not divisible by 8"));
  EXPECT_EQ(Microbatches(options, 600).count(), 4);
}

TEST(IterationsForSamples, CountWholeBatches) {
  EXPECT_EQ(iterations_for_samples({.global_batch_size = 8}, 100), 12);
  EXPECT_EQ(iterations_for_samples({.global_batch_size = 32, .rampup = {8, 8, 600}}, 7), 0);
  // 25 of 8 (200), 13 of 16 (408), 8 of 24 (600), one of 32 while 600 <= 600, then 11 of 32 (984).
  EXPECT_EQ(iterations_for_samples({.global_batch_size = 32, .rampup = {8, 8, 600}}, 1000), 25 + 13 + 8 + 12);
  // The same from the middle of it, and with another batch.
  const MicrobatchOptions ramp{.global_batch_size = 32, .rampup = {8, 8, 600}};
  EXPECT_EQ(iterations_for_samples(ramp, 1000, 26, 216), 25 + 13 + 8 + 12);
  EXPECT_EQ(iterations_for_samples({.global_batch_size = 16}, 1000, 100, 600), 100 + 25);
}

TEST(SamplesOfIterations, AreThoseThatTheStepsTook) {
  const MicrobatchOptions ramp{.global_batch_size = 32, .rampup = {8, 8, 600}};
  EXPECT_EQ(samples_of_iterations(ramp, 0), 0);
  EXPECT_EQ(samples_of_iterations(ramp, 26), 216);
  EXPECT_EQ(samples_of_iterations(ramp, 25 + 13 + 8 + 2), 600 + 2 * 32);
}

}  // namespace
}  // namespace megashard
