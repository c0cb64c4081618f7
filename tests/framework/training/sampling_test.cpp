#include "framework/training/sampling.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "tests/support/message_of.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

TEST(Sampling, NumbersDependOnSeedPromptSampleAndPlace) {
  std::set<double> numbers;
  double sum = 0;
  for (const int64_t seed : {0, 1}) {
    for (int64_t prompt = 0; prompt < 8; ++prompt) {
      for (int64_t sample = 0; sample < 8; ++sample) {
        for (int64_t place = 0; place < 8; ++place) {
          const double number = uniform_number(seed, {prompt, sample}, place);
          EXPECT_EQ(number, uniform_number(seed, {prompt, sample}, place));
          numbers.insert(number);
          sum += number;
        }
      }
    }
  }
  EXPECT_EQ(numbers.size(), 1024);
  EXPECT_NEAR(sum / 1024, 0.5, 4 / std::sqrt(12.0 * 1024));  // four standard deviations
  EXPECT_GE(*numbers.begin(), 0);
  EXPECT_LT(*numbers.rbegin(), 1);
  EXPECT_THAT(message_of([] { uniform_number(0, {0, 1 << 24}, 0); }), HasSubstr("at most 16777216 samples"));
}

TEST(Sampling, ANumberChoosesTheTokenWhereTheSumExceedsIt) {
  const auto row = at::tensor({0.1, 0.0, 0.6, 0.3}, at::kDouble).log();
  const std::vector<double> numbers{0, 0.0999, 0.1001, 0.6999, 0.7001, 0.9999999};
  const auto logits = row.expand({std::ssize(numbers), 4});
  const auto drawn = sample_tokens(logits, at::tensor(numbers, at::kDouble), {});
  EXPECT_TRUE(drawn.tokens.equal(at::tensor({0, 0, 2, 2, 3, 3}, at::kLong))) << drawn.tokens;
  EXPECT_NEAR(drawn.log_probs[2].item<double>(), std::log(0.6), 1e-6);
  const auto cut = sample_tokens(logits, at::tensor(numbers, at::kDouble), {.top_k = 1});
  EXPECT_TRUE(cut.tokens.eq(2).all().item<bool>());
  EXPECT_NEAR(cut.log_probs[0].item<double>(), std::log(0.6), 1e-6);  // of all tokens
  const auto greedy = sample_tokens(logits, at::Tensor(), {.temperature = 0});
  EXPECT_TRUE(greedy.tokens.eq(2).all().item<bool>());
}

TEST(Sampling, TokensAreCutByRankAndThenByTheirSum) {
  const auto scores = at::tensor({0.05, 0.4, 0.25, 0.25, 0.05}, at::kFloat).log().unsqueeze(0);
  const auto kept = [&](const SamplingOptions& options) {
    const auto left = cut_scores(scores, options).gt(-std::numeric_limits<double>::infinity())[0];
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < 5; ++i) {
      if (left[i].item<bool>()) tokens.push_back(i);
    }
    return tokens;
  };
  using Tokens = std::vector<int64_t>;
  EXPECT_EQ(kept({}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_k = 9}), (Tokens{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_k = 2}), (Tokens{1, 2, 3}));  // two are second
  EXPECT_EQ(kept({.top_p = 0.001}), (Tokens{1}));
  EXPECT_EQ(kept({.top_p = 0.85}), (Tokens{1, 2, 3}));
  EXPECT_EQ(kept({.top_k = 1, .top_p = 0.99}), (Tokens{1}));
}

}  // namespace
}  // namespace megashard
