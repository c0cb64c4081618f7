#include "framework/training/training_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>

#include "framework/data/gpt_dataset.h"
#include "tests/framework/data/token_files.h"

namespace megashard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Sample i is i, i + 1, ...; every token of `bad_sample` is above the vocabulary.
class Counting : public TokenDataset {
 public:
  explicit Counting(int64_t size, int64_t bad_sample = -1) : size_(size), bad_sample_(bad_sample) {}
  int64_t size() const override { return size_; }
  void read(int64_t index, std::span<int64_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = index == bad_sample_ ? 1000 : index + static_cast<int64_t>(i);
    }
  }
  const std::string& source_of(int64_t) const override { return name_; }
  void add_facts(int64_t /*samples*/, DatasetFacts& /*facts*/) const override {}

 private:
  int64_t size_;
  int64_t bad_sample_;
  std::string name_ = "counting";
};

// read() returns after free(), or after a second.
class Stuck : public Counting {
 public:
  Stuck() : Counting(8) {}
  void read(int64_t, std::span<int64_t> out) const override {
    freed_.get_future().wait_for(std::chrono::seconds(1));
    Counting::read(0, out);
    has_answered = true;
    throw std::runtime_error("one answer is enough");
  }
  void free() { freed_.set_value(); }
  mutable std::atomic<bool> has_answered = false;

 private:
  mutable std::promise<void> freed_;
};

SamplerOptions sampler(int64_t total, int64_t consumed) {
  return {.total_samples = total,
          .consumed_samples = consumed,
          .micro_batch_size = 2,
          .data_parallel_rank = 1,
          .data_parallel_size = 2};
}

template <typename T>
std::vector<T> values(const at::Tensor& tensor) {
  const T* data = tensor.const_data_ptr<T>();
  return std::vector<T>(data, data + tensor.numel());
}

constexpr BatchOptions kBatch{.seq_length = 3, .vocab_size = 1000};

TEST(DataSampler, SingleHandsEachRankItsSlice) {
  const auto single = make_data_sampler(sampler(11, 4));
  std::vector<int64_t> indices;
  ASSERT_TRUE(single->next(indices));
  EXPECT_THAT(indices, ElementsAre(6, 7));
  EXPECT_FALSE(single->next(indices));  // three samples are left
}

TEST(DataSampler, CyclicResumesWhereItStopped) {
  SamplerOptions options = sampler(18, 0);
  options.type = SamplerType::kCyclic;
  std::vector<std::vector<int64_t>> straight(9);
  const auto whole = make_data_sampler(options);
  for (auto& batch : straight) {
    ASSERT_TRUE(whole->next(batch));
    for (const int64_t index : batch) {
      EXPECT_TRUE(index >= 8 && index < 16) << index;  // rank 1's range
    }
  }
  for (size_t done = 0; done < straight.size(); ++done) {
    options.consumed_samples = 4 * static_cast<int64_t>(done);
    std::vector<int64_t> batch;
    ASSERT_TRUE(make_data_sampler(options)->next(batch));
    EXPECT_EQ(batch, straight[done]) << done;
  }
}

TEST(DataSampler, NamesWhatCannotBeSampled) {
  EXPECT_THAT(message_of([] { make_data_sampler(sampler(8, 8)); }), HasSubstr("no samples left"));
  EXPECT_THAT(message_of([] { make_data_sampler(sampler(0, 0)); }), HasSubstr("no samples"));
  SamplerOptions cyclic = sampler(18, 2);
  cyclic.type = SamplerType::kCyclic;
  EXPECT_THAT(message_of([&] { make_data_sampler(cyclic); }), HasSubstr("no multiple"));
  cyclic.total_samples = 3;
  EXPECT_THAT(message_of([&] { make_data_sampler(cyclic); }), HasSubstr("fewer than one microbatch"));
}

TEST(TokenDataset, ShiftsLabelsByOne) {
  const Batch batch = Counting(9).collate({5, 2}, kBatch);
  EXPECT_THAT(values<int64_t>(batch.tokens()), ElementsAre(5, 6, 7, 2, 3, 4));
  EXPECT_THAT(values<int64_t>(batch.labels()), ElementsAre(6, 7, 8, 3, 4, 5));
  EXPECT_THAT(values<float>(batch.at(kLossMask)), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_FALSE(batch.position_ids().defined());  // the model has its own tables
  EXPECT_FALSE(batch.document_lengths.defined());
  EXPECT_EQ(batch.tokens().sizes(), (at::IntArrayRef{2, 3}));
}

TEST(TokenDataset, RestartsAfterTheEndOfADocument) {
  BatchOptions options = kBatch;
  options.eod_id = 6;
  options.eod_mask_loss = options.reset_position_ids = options.reset_attention_mask = true;
  const Batch batch = Counting(9).collate({5}, options);
  EXPECT_THAT(values<float>(batch.at(kLossMask)), ElementsAre(1, 0, 1));
  EXPECT_THAT(values<int64_t>(batch.position_ids()), ElementsAre(0, 1, 0));
  EXPECT_THAT(values<int64_t>(batch.document_lengths), ElementsAre(2, 1));
}

TEST(DataLoader, YieldsTheSamplersOrderAndItsErrors) {
  const auto dataset = std::make_shared<Counting>(12, /*bad_sample=*/10);
  DataLoader loader(dataset, make_data_sampler(sampler(12, 0)), kBatch);
  EXPECT_THAT(values<int64_t>(loader.next().tokens()), ElementsAre(2, 3, 4, 3, 4, 5));
  EXPECT_THAT(values<int64_t>(loader.next().tokens()), ElementsAre(6, 7, 8, 7, 8, 9));
  const std::string error = message_of([&] { loader.next(); });
  EXPECT_THAT(error, HasSubstr("\"counting\" holds token 1000 (in sample 10)"));
  EXPECT_THAT(error, HasSubstr("vocabulary of 1000"));
}

TEST(DataLoader, SaysThatTheDataIsUsedUp) {
  DataLoader loader(std::make_shared<Counting>(4), make_data_sampler(sampler(4, 0)), kBatch);
  loader.next();
  EXPECT_THAT(message_of([&] { loader.next(); }), HasSubstr("4 samples is used up"));
}

TEST(DataLoader, GivesUpOnDataThatDoesNotCome) {
  const auto stuck = std::make_shared<Stuck>();
  {
    DataLoader loader(stuck, make_data_sampler(sampler(8, 0)), kBatch, {.timeout_seconds = 0.01});
    EXPECT_THAT(message_of([&] { loader.next(); }), HasSubstr("no batch arrived within 0.01 s"));
    EXPECT_GE(loader.take_wait_seconds(), 0.01);
    EXPECT_EQ(loader.take_wait_seconds(), 0.0);
  }
  EXPECT_FALSE(stuck->has_answered) << "the end waits for a read that was given up";
  stuck->free();
}

TEST(DataLoader, RefusesFlagsWithoutAnEndOfDocumentToken) {
  BatchOptions options = kBatch;
  options.eod_mask_loss = true;
  EXPECT_THAT(
      message_of([&] { DataLoader loader(std::make_shared<Counting>(4), make_data_sampler(sampler(4, 0)), options); }),
      HasSubstr("end-of-document token"));
}

}  // namespace
}  // namespace megashard
