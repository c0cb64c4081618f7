#include "framework/data/conversation_dataset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <set>

#include "framework/data/build_datasets.h"
#include "framework/data/sample_dataset.h"
#include "tests/checkpoint/files/temporary_folder.h"
#include "tests/framework/data/token_files.h"
#include "tests/support/default_device.h"

namespace megashard {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::Tensor whole_numbers(std::vector<int64_t> values, at::ScalarType dtype = at::kLong) {
  return at::tensor(values, at::kLong).to(dtype);
}

/// Three conversations: 4 tokens with an image of 4 patches, 3 tokens, 2 tokens with an image of 2.
class ConversationSets : public ::testing::Test {
 protected:
  ConversationSets() {
    entries_["tokens"] = whole_numbers({1, 9, 2, 3, 4, 5, 6, 9, 7}, at::kInt);
    entries_["loss_mask"] = whole_numbers({0, 0, 1, 1, 0, 0, 1, 0, 1}, at::kByte);
    entries_["sample_ends"] = whole_numbers({4, 7, 9});
    entries_["image_ends"] = whole_numbers({1, 1, 2});
    entries_["image_grid_thw"] = whole_numbers({1, 2, 2, 1, 1, 2}).view({2, 3});
    entries_["pixel_values"] = at::arange(18, at::kFloat).view({6, 3});
  }
  /// A video of 4 patches for the second conversation, one of 2 for the third.
  void with_videos() {
    entries_["video_ends"] = whole_numbers({0, 1, 2});
    entries_["video_grid_thw"] = whole_numbers({2, 1, 2, 1, 2, 1}).view({2, 3});
    entries_["pixel_values_videos"] = at::arange(18, at::kFloat).view({6, 3}).neg();
    entries_["second_per_grid_ts"] = at::tensor({0.5F, 1.0F});
  }
  std::string write() {
    const auto prefix = folder_.path() + "/set";
    std::vector<TensorInfo> infos;
    for (const auto& [name, tensor] : entries_) infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
    SafetensorsWriter writer(prefix + ".vision.safetensors", infos);
    for (const auto& info : writer.tensors()) writer.write(entries_.at(info.name));
    writer.finish();
    return prefix;
  }
  std::shared_ptr<ConversationDataset> dataset(int64_t seq_length, std::optional<int64_t> samples) {
    return std::make_shared<ConversationDataset>(
        std::make_shared<ConversationSet>(write()),
        SplitOptions{.split_name = "train", .first = 0, .last = 3, .seq_length = seq_length, .num_samples = samples});
  }
  /// Packs conversations in the order of the file.
  std::shared_ptr<ConversationDataset> packed(int64_t seq_length) {
    return std::make_shared<ConversationDataset>(
        std::make_shared<ConversationSet>(write()),
        SplitOptions{.first = 0, .last = 3, .seq_length = seq_length, .shuffles = false, .packs = true});
  }

  const testing::MadeOnTheHost on_host_;
  TemporaryFolder folder_;
  std::map<std::string, at::Tensor> entries_;
};

TEST_F(ConversationSets, LabelsAreThoseBehindTheFirstToken) {
  entries_["loss_mask"] = whole_numbers({1, 0, 0, 0, 0, 0, 1, 1, 0}, at::kByte);
  const auto one = dataset(8, std::nullopt);
  EXPECT_TRUE(one->has_labels()) << "the second conversation's last token";
  entries_["loss_mask"] = whole_numbers({1, 0, 0, 0, 1, 0, 0, 1, 0}, at::kByte);
  const auto none = dataset(8, std::nullopt);
  EXPECT_FALSE(none->has_labels()) << "first tokens are no labels";
  const auto blend = [](auto... each) {
    return BlendedDataset({each...}, std::vector<double>(sizeof...(each), 1), std::nullopt, "train").has_labels();
  };
  EXPECT_TRUE(blend(none, one));
  EXPECT_FALSE(blend(none, none));
}

TEST_F(ConversationSets, BatchesOfTheLongestWithTheAnswersMask) {
  const auto set = dataset(8, 3);
  std::vector<int64_t> by_size(3);  // indices of the samples with 4, 3 and 2 tokens
  for (int64_t i = 0; i < 3; ++i) by_size[4 - set->conversations(i)[0].tokens.size()] = i;
  const auto batch = set->collate({by_size[0], by_size[2]}, {.seq_length = 8, .vocab_size = 10});
  EXPECT_TRUE(at::equal(batch.tokens(), whole_numbers({1, 9, 2, 9, 0, 0}).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.labels(), whole_numbers({9, 2, 3, 7, 0, 0}).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.at(kLossMask), whole_numbers({0, 1, 1, 1, 0, 0}, at::kFloat).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.token_mask(), whole_numbers({1, 1, 1, 1, 0, 0}).view({2, 3}).to(at::kBool)));
  EXPECT_FALSE(batch.position_ids().defined());
  EXPECT_TRUE(at::equal(batch.at("image_grid_thw"), entries_["image_grid_thw"]));
  EXPECT_TRUE(at::equal(batch.at("pixel_values"), entries_["pixel_values"]));
  const auto text = set->collate({by_size[1]}, {.seq_length = 8, .vocab_size = 10});
  EXPECT_FALSE(text.find("pixel_values").defined());
  EXPECT_THAT([&] { set->collate({by_size[0]}, {.seq_length = 8, .vocab_size = 9}); },
              ThrowsMessage<c10::Error>(HasSubstr("holds token 9")));
}

TEST_F(ConversationSets, BatchesOfVideos) {
  with_videos();
  const auto set = dataset(8, 3);
  std::vector<int64_t> by_size(3);
  for (int64_t i = 0; i < 3; ++i) by_size[4 - set->conversations(i)[0].tokens.size()] = i;
  const auto batch = set->collate(by_size, {.seq_length = 8, .vocab_size = 10});
  for (const auto* name : {"video_grid_thw", "pixel_values_videos", "second_per_grid_ts"})
    EXPECT_TRUE(at::equal(batch.at(name), entries_[name])) << name;
  const auto one = set->collate({by_size[1]}, {.seq_length = 8, .vocab_size = 10});
  EXPECT_FALSE(one.find("pixel_values").defined());
  EXPECT_TRUE(at::equal(one.at("pixel_values_videos"), entries_["pixel_values_videos"].narrow(0, 0, 4)));
  EXPECT_TRUE(at::equal(one.at("second_per_grid_ts"), at::full({1}, 0.5F)));
}

TEST_F(ConversationSets, EachOnceAnEpoch) {
  const auto set = dataset(8, 6);
  ASSERT_EQ(set->size(), 6);
  for (const int64_t first : {0, 3}) {
    std::set<size_t> sizes;
    for (int64_t i = 0; i < 3; ++i) sizes.insert(set->conversations(first + i)[0].tokens.size());
    EXPECT_EQ(sizes.size(), 3U);
  }
}

TEST_F(ConversationSets, ArePackedWithoutCrossingIntoEachOther) {
  const auto set = packed(4);
  ASSERT_EQ(set->size(), 2);  // one of 3 + 1 and one of 2 tokens with labels
  const auto batch = set->collate({0, 1}, {.seq_length = 4, .vocab_size = 10});
  EXPECT_TRUE(at::equal(batch.tokens(), whole_numbers({1, 9, 2, 9, 4, 5, 0, 0}).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.labels(), whole_numbers({9, 2, 3, 7, 5, 6, 0, 0}).view({2, 4})))
      << "a conversation's last token has no label and is none's input";
  EXPECT_TRUE(at::equal(batch.at(kLossMask), whole_numbers({0, 1, 1, 1, 0, 1, 0, 0}, at::kFloat).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.token_mask(), whole_numbers({1, 1, 1, 1, 1, 1, 0, 0}).view({2, 4}).to(at::kBool)));
  EXPECT_TRUE(at::equal(batch.position_ids(), whole_numbers({0, 1, 2, 0, 0, 1, 0, 0}).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.document_lengths, whole_numbers({3, 1, 2, 2}))) << "what is filled up stands alone";
  EXPECT_TRUE(at::equal(batch.at("pixel_values"), entries_["pixel_values"]));
  const auto last = set->collate({1}, {.seq_length = 4, .length_multiple = 3, .vocab_size = 10});
  EXPECT_TRUE(at::equal(last.document_lengths, whole_numbers({2, 1})));
  EXPECT_THAT([&] { packed(2); }, ThrowsMessage<c10::Error>(HasSubstr("conversation 0 of ")));
}

/// The lengths of the conversations of each sample.
std::vector<std::vector<size_t>> sizes_of(const ConversationDataset& set) {
  std::vector<std::vector<size_t>> sizes(static_cast<size_t>(set.size()));
  for (int64_t i = 0; i < set.size(); ++i) {
    for (const auto& each : set.conversations(i)) sizes[static_cast<size_t>(i)].push_back(each.tokens.size());
  }
  return sizes;
}

TEST_F(ConversationSets, ArePackedEpochByEpochInTheSameOrderForMoreSteps) {
  const auto of_seed = [&](int64_t seed, int64_t samples) {
    return ConversationDataset(
        std::make_shared<ConversationSet>(write()),
        SplitOptions{.first = 0, .last = 3, .seq_length = 5, .seed = seed, .packs = true, .num_samples = samples});
  };
  const auto some = sizes_of(of_seed(1, 5)), more = sizes_of(of_seed(1, 40));
  ASSERT_EQ(some.size(), 5);
  EXPECT_TRUE(std::ranges::equal(some, more | std::views::take(5))) << "a longer run goes on from the same samples";
  EXPECT_NE(more, sizes_of(of_seed(2, 40)));
  for (size_t i = 0; i < 40; i += 2) {  // 3 + 2, 3 + 1 or 2 + 1 tokens, then the third conversation
    std::multiset<size_t> epoch(more[i].begin(), more[i].end());
    epoch.insert(more[i + 1].begin(), more[i + 1].end());
    EXPECT_EQ(epoch, (std::multiset<size_t>{2, 3, 4})) << i;
  }
  DatasetFacts facts;
  of_seed(1, 40).add_facts(4, facts);
  EXPECT_EQ(facts.max_epochs, 2);
}

TEST_F(ConversationSets, PackedRowsOfABlendAreFilledUpAsDocuments) {
  const DataOptions options{.data_path = {"1", write(), "1", folder_.path() + "/set"},
                            .split = "1,0,0",
                            .seq_length = 4,
                            .shuffle_conversations = false,
                            .neat_packing = true,
                            .train_samples = 4,
                            .valid_samples = 0,
                            .test_samples = 0};
  const auto batch = build_datasets(options).train->collate({0, 3}, {.seq_length = 4, .vocab_size = 10});
  EXPECT_TRUE(at::equal(batch.tokens(), whole_numbers({1, 9, 2, 9, 4, 5, 0, 0}).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.position_ids(), whole_numbers({0, 1, 2, 0, 0, 1, 0, 0}).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.document_lengths, whole_numbers({3, 1, 2, 2})));
}

TEST_F(ConversationSets, NothingIsPackedOfDocumentsAlone) {
  DataOptions options{.data_path = {write_documents(fresh_prefix("documents"), {40})},
                      .split = "1,0,0",
                      .seq_length = 8,
                      .neat_packing = true,
                      .train_samples = 3};
  EXPECT_THAT([&] { build_datasets(options); },
              ThrowsMessage<UsageError>(HasSubstr("the train data are documents, which fill their samples anyway")));
  options.data_path.push_back(write());
  EXPECT_NO_THROW(build_datasets(options));
}

TEST_F(ConversationSets, AreFoundByTheirPrefixAndBlendedWithAnySet) {
  DataOptions options{.data_path = {write()}, .split = "1,0,0", .seq_length = 8, .train_samples = 5};
  EXPECT_EQ(build_datasets(options).train->size(), 5);
  options.data_path = {"0.5", options.data_path[0], "0.5", write_documents(fresh_prefix("beside"), {40})};
  options.valid_samples = options.test_samples = 0;
  const auto blend = build_datasets(options).train;
  const auto is_conversation = [&](int64_t i) { return blend->source_of(i) == options.data_path[1]; };
  ASSERT_TRUE(is_conversation(0) && !is_conversation(1));
  BatchOptions of_batch{.seq_length = 8, .vocab_size = 100};
  const auto conversation = blend->collate({0}, of_batch), document = blend->collate({1}, of_batch);
  const int64_t length = conversation.tokens().size(1);
  ASSERT_LT(length, 8);
  const auto both = blend->collate({1, 0}, of_batch);
  EXPECT_TRUE(at::equal(both.tokens()[0], document.tokens()[0]));
  for (const char* name : {kTokens, kLabels, kLossMask, kTokenMask}) {
    EXPECT_TRUE(at::equal(both.at(name)[1].narrow(0, 0, length), conversation.at(name)[0])) << name;
    EXPECT_EQ(both.at(name)[1].narrow(0, length, 8 - length).sum().item<double>(), 0) << name;
  }
  EXPECT_TRUE(both.token_mask()[0].all().item<bool>());
  EXPECT_EQ(both.columns.size(), conversation.columns.size());
  const auto facts = [&] {
    DatasetFacts found;
    blend->add_facts(5, found);
    return found;
  }();
  EXPECT_EQ(facts.units, (std::map<std::string, int64_t>{{"conversation", 3}, {"document", 1}}));
  of_batch.reset_position_ids = true;
  EXPECT_NO_THROW(blend->collate({0}, of_batch));
  EXPECT_THAT(
      [&] {
        blend->collate({0, 1}, of_batch);
      },
      ThrowsMessage<c10::NotImplementedError>(HasSubstr("give --micro-batch-size 1")));
}

TEST_F(ConversationSets, BesideDocumentsOfTheSamePrefixAreRefused) {
  const auto prefix = write_documents(write(), {40});
  const DataOptions options{.data_path = {prefix}, .split = "1,0,0", .seq_length = 8, .train_samples = 5};
  EXPECT_THAT([&] { build_datasets(options); },
              ThrowsMessage<UsageError>(HasSubstr("set.vision.safetensors and " + prefix + ".idx are two data sets")));
}

TEST_F(ConversationSets, DamageIsNamed) {
  const auto refuses = [&](const char* name, const at::Tensor& value, const std::string& message) {
    const auto before = std::exchange(entries_[name], value);
    EXPECT_THAT([&] { ConversationSet set(write()); }, ThrowsMessage<c10::Error>(HasSubstr(message)));
    entries_[name] = before;
  };
  refuses("sample_ends", whole_numbers({4, 3, 9}), "sample_ends goes back from 4 to 3");
  refuses("sample_ends", whole_numbers({4, 7, 8}), "sample_ends ends at 8 instead of 9");
  refuses("image_ends", whole_numbers({1, 2}), "must be of one size");
  refuses("image_grid_thw", whole_numbers({1, 2, 2, 1, 1, 3}).view({2, 3}), "more patches than the 6");
  refuses("image_grid_thw", whole_numbers({1, 2, 2, 1, 1, -2}).view({2, 3}), "has a grid with -2");
  refuses("image_grid_thw", whole_numbers({1, 2, 2, 1, 1, 1}).view({2, 3}), "describes 5 patches, pixel_values has 6");
  refuses("tokens", whole_numbers({1, 2}), "tokens must be Int with 1 dimensions, got Long [2]");
  with_videos();
  refuses("video_ends", whole_numbers({0, 1, 1}), "video_ends ends at 1 instead of 2");
  refuses("video_grid_thw", whole_numbers({2, 1, 2, 1, 2, 2}).view({2, 3}),
          "more patches than the 6 of pixel_values_videos");
  refuses("second_per_grid_ts", at::full({3}, 0.5F), "for each of the 2 videos, not 3");
  entries_.erase("second_per_grid_ts");
  EXPECT_THAT([&] { ConversationSet set(write()); }, ThrowsMessage<c10::Error>(HasSubstr("has no second_per_grid_ts")));
  with_videos();
  EXPECT_THAT([&] { dataset(2, 3); }, ThrowsMessage<c10::Error>(HasSubstr("conversation 0 of ")));
}

}  // namespace
}  // namespace megashard
