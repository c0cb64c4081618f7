// Writes the samples of our data pipeline for a JSON list of cases, as a flat file of int64 values; test_data_order.py
// compares them with megatron-core. Usage: dump_samples CASES.json OUT

#include <ATen/ops/arange.h>
#include <ATen/ops/diag.h>
#include <ATen/ops/ones.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "framework/data/build_datasets.h"
#include "framework/training/training_data.h"

namespace {

using megashard::BatchOptions;
using megashard::DataOptions;
using megashard::SampleDataset;
using nlohmann::json;

class Output {
 public:
  explicit Output(const char* path) : file_(path, std::ios::binary) {}
  void put(int64_t value) { put(&value, 1); }
  void put(const int64_t* values, size_t count) {
    file_.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(count * sizeof(int64_t)));
  }

 private:
  std::ofstream file_;
};

std::vector<std::string> words(const json& item, const char* key) {
  return item.value(key, std::vector<std::string>{});
}

std::optional<int64_t> samples_of(const json& item, size_t split) {
  const json& value = item.at("samples").at(split);
  return value.is_null() ? std::nullopt : std::optional(value.get<int64_t>());
}

DataOptions data_options(const json& item) {
  return {.data_path = words(item, "data_path"),
          .split = item.value("split", "969,30,1"),
          .train_data_path = words(item, "train_data_path"),
          .valid_data_path = words(item, "valid_data_path"),
          .test_data_path = words(item, "test_data_path"),
          .mock_data = item.value("mock_data", false),
          .seq_length = item.at("seq_length"),
          .seed = item.at("seed"),
          .vocab_size = item.value("vocab_size", 0),
          .eod_id = item.value("eod_id", -1),
          .train_samples = samples_of(item, 0),
          .valid_samples = samples_of(item, 1),
          .test_samples = samples_of(item, 2)};
}

/// Megatron's mask, which is true for the tokens that a token cannot see.
at::Tensor hidden_by(const at::Tensor& document_lengths) {
  if (!document_lengths.defined()) return {};
  const at::Tensor hidden = at::ones({document_lengths.sum().item<int64_t>()}, at::kBool).diag().logical_not();
  int64_t begin = 0;
  for (int64_t i = 0; i < document_lengths.numel(); ++i) {
    const int64_t length = document_lengths[i].item<int64_t>();
    hidden.narrow(0, begin, length).narrow(1, begin, length).triu_(1);
    begin += length;
  }
  return hidden;
}

void dump_batch(const SampleDataset& dataset, int64_t index, const json& item, Output& out) {
  const BatchOptions options{.seq_length = item.at("seq_length"),
                             .vocab_size = item.at("vocab_size"),
                             .eod_id = item.at("eod_id"),
                             .eod_mask_loss = item.at("eod_mask_loss"),
                             .reset_position_ids = item.at("reset_position_ids"),
                             .reset_attention_mask = item.at("reset_attention_mask")};
  megashard::Batch batch = dataset.collate({index}, options);
  if (!batch.position_ids().defined())
    batch.set(megashard::kPositionIds, at::arange(batch.tokens().size(1), at::kLong).expand_as(batch.tokens()));
  for (const at::Tensor& tensor : {batch.tokens(), batch.labels(), batch.at(megashard::kLossMask), batch.position_ids(),
                                   hidden_by(batch.document_lengths)}) {
    if (tensor.defined()) {
      const at::Tensor values = tensor.to(at::kLong).contiguous();
      out.put(values.const_data_ptr<int64_t>(), static_cast<size_t>(values.numel()));
    }
  }
}

void dump_tokens(const SampleDataset& dataset, int64_t index, int64_t length, Output& out) {
  const BatchOptions options{.seq_length = length, .vocab_size = std::numeric_limits<int64_t>::max()};
  const megashard::Batch batch = dataset.collate({index}, options);
  out.put(batch.tokens().const_data_ptr<int64_t>(), static_cast<size_t>(length));
  out.put(batch.labels().const_data_ptr<int64_t>()[length - 1]);
}

// For each split: the number of samples (-1: no such split), then the tokens of the first `limit` samples.
void dump_datasets(const json& item, Output& out) {
  const megashard::DataSplits splits = megashard::build_datasets(data_options(item));
  for (const auto& dataset : {splits.train, splits.valid, splits.test}) {
    out.put(dataset == nullptr ? -1 : dataset->size());
    const int64_t count = dataset == nullptr ? 0 : std::min<int64_t>(dataset->size(), item.value("limit", 1 << 30));
    for (int64_t i = 0; i < count; ++i) {
      if (item.contains("eod_mask_loss")) {
        dump_batch(*dataset, i, item, out);
      } else {
        dump_tokens(*dataset, i, item.at("seq_length"), out);
      }
    }
  }
}

// The first `batches` micro batches, each as its length and its indices. -1 if there are fewer.
void dump_sampler(const json& item, Output& out) {
  const bool cyclic = item.at("sampler") == "cyclic";
  const auto sampler =
      megashard::make_data_sampler({.type = cyclic ? megashard::SamplerType::kCyclic : megashard::SamplerType::kSingle,
                                    .total_samples = item.at("total"),
                                    .consumed_samples = item.at("consumed"),
                                    .micro_batch_size = item.at("micro_batch_size"),
                                    .data_parallel_rank = item.at("rank"),
                                    .data_parallel_size = item.at("ranks")});
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < item.at("batches").get<int64_t>(); ++i) {
    if (!sampler->next(indices)) {
      out.put(-1);
      return;
    }
    out.put(static_cast<int64_t>(indices.size()));
    out.put(indices.data(), indices.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: dump_samples CASES.json OUT\n");
    return 2;
  }
  try {
    std::ifstream cases(argv[1]);
    Output out(argv[2]);
    for (const json& item : json::parse(cases)) {
      item.contains("sampler") ? dump_sampler(item, out) : dump_datasets(item, out);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dump_samples: %s\n", error.what());
    return 1;
  }
  return 0;
}
