#include "framework/data/gpt_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "framework/data/mock_tokens.h"
#include "tests/framework/data/token_files.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::shared_ptr<IndexedDataset> documents(const std::vector<int>& lengths) {
  return std::make_shared<IndexedDataset>(write_documents(fresh_prefix("set"), lengths));
}

std::vector<int64_t> sample_of(const GPTDataset& dataset, int64_t index, size_t tokens) {
  std::vector<int64_t> sample(tokens);
  dataset.read(index, sample);
  return sample;
}

SplitOptions options(int64_t sequences, int64_t seq_length, std::optional<int64_t> samples) {
  return {.last = sequences, .seq_length = seq_length, .seed = 1, .num_samples = samples};
}

// RandomState(1) shuffles the three documents to 0, 2, 1, then the three samples to 1, 2, 0.
TEST(GPTDataset, CutsOverlappingSamplesFromShuffledDocuments) {
  const GPTDataset dataset(documents({4, 3, 6}), options(3, 4, std::nullopt));
  ASSERT_EQ(dataset.size(), 3);
  EXPECT_THAT(sample_of(dataset, 0, 5), ElementsAre(7, 8, 9, 10, 11));
  EXPECT_THAT(sample_of(dataset, 1, 5), ElementsAre(11, 12, 4, 5, 6));
  EXPECT_THAT(sample_of(dataset, 2, 5), ElementsAre(0, 1, 2, 3, 7));
}

TEST(GPTDataset, AddsEpochsUntilThereAreEnoughSamples) {
  const auto source = documents({4, 3, 6});
  // 13 tokens in an epoch: 3 samples of 4 + 1 in one epoch, 6 in two, 9 in three.
  EXPECT_EQ(GPTDataset(source, options(3, 4, 3)).num_epochs(), 1);
  EXPECT_EQ(GPTDataset(source, options(3, 4, 4)).num_epochs(), 2);
  const GPTDataset six(source, options(3, 4, 6));
  EXPECT_EQ(six.num_epochs(), 2);
  EXPECT_EQ(six.size(), 6);
  // A set shorter than one sample is repeated as often as needed.
  EXPECT_EQ(GPTDataset(source, options(3, 100, 2)).num_epochs(), 16);
}

TEST(GPTDataset, ShufflesALastEpochApartBelowEightyPercent) {
  const auto source = documents({40, 61});  // 101 tokens, 10 samples of 10 + 1
  EXPECT_FALSE(GPTDataset(source, options(2, 10, 10)).separate_last_epoch());
  EXPECT_TRUE(GPTDataset(source, options(2, 10, 17)).separate_last_epoch());
  EXPECT_FALSE(GPTDataset(source, options(2, 10, 18)).separate_last_epoch());
}

TEST(GPTDataset, NamesAnEmptySplit) {
  const auto source = documents({4, 0, 6});
  const auto error = [&](SplitOptions wanted) {
    wanted.split_name = "test";
    return message_of([&] { GPTDataset dataset(source, wanted); });
  };
  EXPECT_THAT(error({.first = 3, .last = 3, .seq_length = 4, .num_samples = 1}), HasSubstr("the test split of"));
  EXPECT_THAT(error({.first = 1, .last = 2, .seq_length = 4, .num_samples = 1}),
              HasSubstr("has 0 tokens in its 1 documents"));
  EXPECT_THAT(error(options(1, 4, std::nullopt)), HasSubstr("give --seq-length 3 or less"));
  EXPECT_THAT(error({.last = 4, .seq_length = 4}), HasSubstr("do not lie in"));
}

TEST(MockTokens, AreMegatrons) {
  const MockTokens mock(100, 99);
  const auto lengths = mock.sequence_lengths();
  ASSERT_EQ(lengths.size(), 100000U);
  // numpy.random.default_rng(0).integers(1, 4096, 100000, int32)
  EXPECT_THAT(lengths.first(6), ElementsAre(3484, 2609, 2094, 1105, 1261, 168));
  EXPECT_THAT(lengths.last(4), ElementsAre(2592, 61, 100, 769));
  std::vector<int64_t> tokens(5);
  mock.copy_tokens(0, 96, tokens);
  EXPECT_THAT(tokens, ElementsAre(97, 98, 99, 0, 1));
  mock.copy_tokens(0, 3479, tokens);
  EXPECT_THAT(tokens, ElementsAre(80, 81, 82, 83, 99));
}

}  // namespace
}  // namespace megashard
