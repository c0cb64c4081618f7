#include "framework/data/build_datasets.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "framework/data/data_formats.h"
#include "framework/data/gpt_dataset.h"
#include "framework/data/sample_dataset.h"
#include "tests/framework/data/token_files.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// `size` samples. Every token of a sample encodes its member and its number.
class Numbered : public TokenDataset {
 public:
  Numbered(int64_t size, int64_t id) : size_(size), id_(id) {}
  int64_t size() const override { return size_; }
  void read(int64_t index, std::span<int64_t> out) const override { std::ranges::fill(out, 100 * id_ + index); }
  const std::string& source_of(int64_t) const override { return name_; }
  void add_facts(int64_t /*samples*/, DatasetFacts& /*facts*/) const override {}

 private:
  int64_t size_;
  int64_t id_;
  std::string name_ = "numbered";
};

std::vector<int64_t> order(const SampleDataset& dataset) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    result.push_back(dataset.collate({i}, {.seq_length = 1, .vocab_size = 1000}).tokens().item<int64_t>());
  }
  return result;
}

std::vector<std::shared_ptr<const SampleDataset>> members(int64_t first, int64_t second) {
  return {std::make_shared<Numbered>(first, 1), std::make_shared<Numbered>(second, 2)};
}

TEST(BlendedDataset, TakesTheMemberThatLagsMost) {
  const BlendedDataset blend(members(9, 9), {3, 1}, 6, "train");
  EXPECT_THAT(order(blend), ElementsAre(100, 200, 101, 102, 103, 201));
  EXPECT_ANY_THROW(BlendedDataset(members(9, 9), {3, 0}, 6, "train"));
}

TEST(BlendedDataset, JoinsTheRowsOfItsMembersInTheirOrder) {
  const BlendedDataset blend(members(9, 9), {3, 1}, 6, "train");
  const Batch batch = blend.collate(
      {1, 0, 3},
      {.seq_length = 2, .vocab_size = 1000, .eod_id = 100, .reset_position_ids = true, .reset_attention_mask = true});
  EXPECT_TRUE(at::equal(batch.tokens(), at::tensor({200, 200, 100, 100, 102, 102}).view({3, 2})));
  EXPECT_TRUE(at::equal(batch.labels(), batch.tokens()));
  EXPECT_TRUE(at::equal(batch.position_ids(), at::tensor({0, 1, 0, 0, 0, 1}).view({3, 2})));
  EXPECT_TRUE(at::equal(batch.document_lengths, at::tensor({2, 1, 1, 2})));
  EXPECT_FALSE(batch.token_mask().defined());
}

TEST(BlendedDataset, DropsSpentMembers) {
  const BlendedDataset blend(members(1, 4), {}, std::nullopt, "train");
  EXPECT_THAT(order(blend), ElementsAre(200, 100, 201, 202, 203));
}

TEST(BlendedDataset, NamesAMemberThatIsTooSmall) {
  EXPECT_THAT(message_of([] {
                BlendedDataset blend(members(2, 9), {1, 1}, 8, "valid");
              }),
              HasSubstr("the valid blend draws 4 samples from \"numbered\", which has 2"));
}

TEST(ParseSplit, NormalisesWeights) {
  const SplitShares shares = parse_split("969, 30,1");
  EXPECT_EQ(shares[0]->begin, 0.0);
  EXPECT_EQ(shares[0]->end, 0.969);
  EXPECT_EQ(shares[1]->end, shares[2]->begin);
  const SplitShares two = parse_split("90,0,10");
  EXPECT_FALSE(two[1].has_value());
  EXPECT_EQ(two[2]->begin, 0.9);
  EXPECT_FALSE(parse_split("1")[1].has_value());
}

TEST(ParseSplit, RefusesWhatIsNoSplit) {
  for (const char* wrong : {"", "a,b,c", "1,,1", "-1,2", "0,0,0", "1,2,3,4", "1;2", "nan,1"}) {
    EXPECT_THAT(message_of([&] { parse_split(wrong); }), HasSubstr("--split \"")) << wrong;
  }
}

TEST(ParseBlend, ReadsPrefixesOrWeights) {
  EXPECT_THAT(parse_blend({"a", "b"}).prefixes, ElementsAre("a", "b"));
  EXPECT_THAT(parse_blend({"1", "b", "2"}).prefixes, ElementsAre("1", "b", "2"));
  const Blend weighted = parse_blend({"0.3", " a ", "7e-1", "b"});
  EXPECT_THAT(weighted.prefixes, ElementsAre("a", "b"));
  EXPECT_THAT(weighted.weights, ElementsAre(0.3, 0.7));
  EXPECT_THAT(message_of([] { parse_blend({"1", "a", "b", "c"}); }), HasSubstr("weights for 1 of 2"));
  EXPECT_THAT(message_of([] { parse_blend({"0", "a"}); }), HasSubstr("is not positive"));
}

DataOptions ten_documents(const std::string& split) {
  const std::vector<int> lengths(10, 9);
  return {.data_path = {write_documents(fresh_prefix("set"), lengths)},
          .split = split,
          .seq_length = 4,
          .train_samples = 5,
          .valid_samples = 2,
          .test_samples = 0};
}

TEST(BuildDatasets, DividesOneSet) {
  const DataSplits splits = build_datasets(ten_documents("80,20"));
  EXPECT_EQ(splits.train->size(), (8 * 9 - 1) / 4);
  EXPECT_EQ(splits.valid->size(), (2 * 9 - 1) / 4);
  EXPECT_EQ(splits.test, nullptr);
}

// Megatron loops forever here.
TEST(BuildDatasets, NamesAnEmptySplitUnlessItIsNotAskedFor) {
  DataOptions options = ten_documents("969,30,1");
  options.valid_samples = 0;
  EXPECT_EQ(build_datasets(options).test, nullptr);
  options.test_samples = 3;
  EXPECT_THAT(message_of([&] { build_datasets(options); }),
              HasSubstr("--split 969,30,1 leaves the test split no document of"));
}

// A newcomer with a small data set needs one flag to continue.
TEST(BuildDatasets, ASplitThatLeavesASmallSetNothingIsToldABetterOne) {
  DataOptions options = ten_documents(kDefaultSplit);
  options.test_samples = 1;
  const std::string all = "--split 100,0,0 to train on all of them and evaluate on none";
  EXPECT_THAT(message_of([&] { build_datasets(options); }),
              HasSubstr("which has 10; give --split 80,10,10, which leaves each split some, or " + all));
  for (const auto& [count, split] : std::map<int, std::string>{{76, "98,1,1"}, {20, "90,5,5"}, {3, "34,33,33"}}) {
    options.split = kDefaultSplit;
    options.data_path = {write_documents(fresh_prefix("set"), std::vector<int>(count, 9))};
    EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("give --split " + split));
    options.split = split;
    EXPECT_NE(build_datasets(options).test, nullptr);
  }
  options.data_path = {write_documents(fresh_prefix("set"), {9, 9})};
  EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("which has 2; give " + all));
  options.split = "100,0,0";
  EXPECT_EQ(build_datasets(options).test, nullptr);
}

TEST(BuildDatasets, SaysHowSmallASetMayBeWithoutWeights) {
  DataOptions options = ten_documents("1");
  options.train_samples = std::nullopt;
  options.seq_length = 90;
  EXPECT_THAT(message_of([&] { build_datasets(options); }),
              HasSubstr("has 90 tokens in its 10 documents, and a sample takes --seq-length + 1 = 91; "
                        "give --seq-length 89 or less"));
  options.seq_length = 89;
  EXPECT_EQ(build_datasets(options).train->size(), 1);
}

TEST(BuildDatasets, WarnsOfTokensThatTheTokenizerCannotHaveWritten) {
  std::vector<std::string> warnings;
  DataOptions options = ten_documents("1");
  options.data_path = {fresh_prefix("short")};
  IndexedDatasetWriter writer(options.data_path[0], TokenType::kUInt16);
  writer.add_document(std::vector<int64_t>{1, 2, 3, 4, 5, 6});
  writer.finish();
  options.sink = [&](Severity, const std::string& message) { warnings.push_back(message); };
  options.vocab_size = 65536;
  build_datasets(options);
  EXPECT_TRUE(warnings.empty());
  options.vocab_size = 128256;
  build_datasets(options);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("but the model has a vocabulary of 128256"));
}

TEST(BuildDatasets, WantsOneSource) {
  DataOptions options = ten_documents("1");
  options.mock_data = true;
  EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("got 2 of them"));
  EXPECT_THAT(message_of([] { build_datasets({}); }), HasSubstr("got 0 of them"));
}

TEST(BuildDatasets, WantsTrainingData) {
  DataOptions options = ten_documents("0,1,0");
  EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("weight of 0"));
  std::swap(options.valid_data_path, options.data_path);
  EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("--train-data-path is missing"));
}

/// A document for each letter of PREFIX.letters, whose tokens are its number.
class Letters : public TokenSource {
 public:
  explicit Letters(const std::string& prefix)
      : prefix_(prefix), lengths_(std::filesystem::file_size(prefix + ".letters"), 3) {}
  std::span<const int32_t> sequence_lengths() const override { return lengths_; }
  void copy_tokens(int64_t sequence, int64_t /*offset*/, std::span<int64_t> out) const override {
    std::ranges::fill(out, sequence);
  }
  const std::string& name() const override { return prefix_; }

 private:
  std::string prefix_;
  std::vector<int32_t> lengths_;
};

const RegisterDataFormat kLetters({".letters", [](const std::string& prefix) {
                                     return source_of(std::make_shared<Letters>(prefix));
                                   }});

TEST(DataFormats, ARegisteredOneOpensItsFiles) {
  DataOptions options = ten_documents("1");
  const std::string prefix = fresh_prefix("five");
  options.data_path = {prefix};
  std::ofstream(prefix + ".letters") << "abcde";
  DatasetFacts facts;
  build_datasets(options).train->add_facts(1, facts);
  EXPECT_EQ(facts.units.at("document"), 5);
  write_documents(prefix, {4, 4});
  EXPECT_THAT(message_of([&] { build_datasets(options); }), HasSubstr("five.idx and " + prefix + ".letters are two"));
}

TEST(DataFormats, OneOfAnotherStampIsIgnored) {
  const auto before = std::pair(ignored_data_formats(), data_formats().size());
  const RegisterDataFormat old({".old", {}}, {.libtorch = "1.0"});
  EXPECT_EQ(std::pair(ignored_data_formats(), data_formats().size()), std::pair(before.first + 1, before.second));
}

}  // namespace
}  // namespace megashard
