#include "framework/data/gpt_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "checkpoint/files/work_progress.h"
#include "framework/data/numpy_random.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

/// Writes the seq_length + 1 tokens of a sample as one row of tokens, labels and masks.
class RowWriter {
 public:
  RowWriter(const Batch& batch, const BatchOptions& options)
      : tokens_(batch.tokens()),
        labels_(batch.labels()),
        loss_mask_(batch.at(kLossMask)),
        position_ids_(batch.position_ids()),
        options_(options) {}

  void write(int64_t row, const std::vector<int64_t>& sample) {
    const int64_t length = options_.seq_length;
    int64_t* tokens = tokens_.mutable_data_ptr<int64_t>() + row * length;
    int64_t* labels = labels_.mutable_data_ptr<int64_t>() + row * length;
    float* loss_mask = loss_mask_.mutable_data_ptr<float>() + row * length;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t token = sample[static_cast<size_t>(i)];
      const bool eod = token == options_.eod_id;
      loss_mask[i] = eod && options_.eod_mask_loss ? 0.0F : 1.0F;
      tokens[i] = token;
      labels[i] = sample[static_cast<size_t>(i) + 1];
    }
    if (options_.reset_position_ids) write_positions(row, sample);
    if (options_.reset_attention_mask) write_documents(sample);
  }

  at::Tensor document_lengths() const { return at::tensor(document_lengths_, at::device(at::kCPU).dtype(at::kLong)); }

 private:
  void write_positions(int64_t row, const std::vector<int64_t>& sample) {
    const int64_t length = options_.seq_length;
    int64_t* positions = position_ids_.mutable_data_ptr<int64_t>() + row * length;
    int64_t begin = 0;
    for (int64_t i = 0; i < length; ++i) {
      positions[i] = i - begin;
      if (sample[static_cast<size_t>(i)] == options_.eod_id) begin = i + 1;
    }
  }

  void write_documents(const std::vector<int64_t>& sample) {
    int64_t begin = 0;
    for (int64_t i = 0; i < options_.seq_length; ++i) {
      if (sample[static_cast<size_t>(i)] != options_.eod_id && i + 1 < options_.seq_length) continue;
      document_lengths_.push_back(i + 1 - begin);
      begin = i + 1;
    }
  }

  at::Tensor tokens_, labels_, loss_mask_, position_ids_;
  const BatchOptions& options_;
  std::vector<int64_t> document_lengths_;
};

}  // namespace

Batch TokenDataset::collate(const std::vector<int64_t>& indices, const BatchOptions& options) const {
  const auto rows = static_cast<int64_t>(indices.size());
  const int64_t length = options.seq_length;
  const auto empty = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::empty(shape, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  Batch batch;
  batch.set(kTokens, empty({rows, length}, at::kLong));
  batch.set(kLabels, empty({rows, length}, at::kLong));
  batch.set(kLossMask, empty({rows, length}, at::kFloat), Axis::kToken, /*is_input=*/false);
  if (options.reset_position_ids) batch.set(kPositionIds, empty({rows, length}, at::kLong));
  RowWriter writer(batch, options);
  std::vector<int64_t> sample(static_cast<size_t>(length) + 1);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = indices[static_cast<size_t>(row)];
    read(index, sample);
    check_tokens(sample, index, options);
    writer.write(row, sample);
  }
  if (options.reset_attention_mask) batch.document_lengths = writer.document_lengths();
  return batch;
}

namespace {

// The last epoch is shuffled separately if less than this share of its samples is used.
constexpr double kLastEpochThreshold = 0.80;

constexpr int64_t kSamplesAtOnce = 1 << 16;  // samples between progress reports
constexpr int64_t kMaxEntries = std::numeric_limits<uint32_t>::max() - 1;

}  // namespace

GPTDataset::GPTDataset(std::shared_ptr<const TokenSource> source, SplitOptions options)
    : source_(std::move(source)), options_(std::move(options)) {
  TORCH_CHECK(options_.seq_length > 0, "the sequence length must be positive, got ", options_.seq_length,
              "; set --seq-length");
  const auto sequences = static_cast<int64_t>(source_->sequence_lengths().size());
  TORCH_CHECK(
      0 <= options_.first && options_.first <= options_.last && options_.last <= sequences && sequences <= kMaxEntries,
      "sequences [", options_.first, ", ", options_.last, ") do not lie in \"", source_->name(), "\", which has ",
      sequences);
  TORCH_CHECK(options_.first < options_.last, "the ", options_.split_name, " split of \"", source_->name(),
              "\" is empty: none of its ", sequences,
              " documents falls into it; give it a larger share with --split, add documents, or ask for no samples of "
              "it (--eval-iters 0)");
  const int64_t epoch_tokens = tokens_per_epoch();
  plan_epochs(epoch_tokens);
  const int64_t samples = (num_epochs_ * epoch_tokens - 1) / options_.seq_length;
  TORCH_CHECK(samples <= kMaxEntries, "the ", options_.split_name, " split of \"", source_->name(), "\" would have ",
              samples, " samples, the limit is ", kMaxEntries, "; use a longer --seq-length or fewer iterations");

  NumpyRandomState random(options_.seed);
  build_document_index(random);
  build_sample_index(samples);
  build_shuffle_index(samples, random);
}

int64_t GPTDataset::tokens_per_epoch() const {
  const auto lengths = source_->sequence_lengths();
  const int64_t tokens = std::accumulate(lengths.begin() + options_.first, lengths.begin() + options_.last, int64_t{0});
  // An epoch may be shorter than a sample if epochs are repeated.
  const int64_t least = options_.num_samples.has_value() ? 1 : options_.seq_length + 1;
  const std::string found = c10::str("the ", options_.split_name, " split of \"", source_->name(), "\" has ", tokens,
                                     " tokens in its ", options_.last - options_.first, " documents");
  TORCH_CHECK(tokens > 0, found, "; give the split more documents by --split, or leave the set out");
  require(tokens >= least, found +
                               ", and a sample takes --seq-length + 1 = " + std::to_string(options_.seq_length + 1) +
                               "; give --seq-length " + std::to_string(std::max<int64_t>(1, tokens - 1)) +
                               " or less, or weights (--data-path WEIGHT PREFIX ...), by which "
                               "small sets are repeated");
  return tokens;
}

void GPTDataset::plan_epochs(int64_t epoch_tokens) {
  if (!options_.num_samples.has_value()) return;
  const int64_t seq_length = options_.seq_length;
  const int64_t samples = *options_.num_samples;
  TORCH_CHECK(samples >= 0 && samples <= kMaxEntries, "the number of ", options_.split_name,
              " samples must lie in [0, ", kMaxEntries, "], got ", samples,
              "; check the number of iterations and the global batch size");
  const int64_t wanted_tokens = samples * seq_length + 1;
  num_epochs_ = std::max<int64_t>(1, (wanted_tokens + epoch_tokens - 1) / epoch_tokens);
  if (num_epochs_ == 1) return;
  samples_before_last_epoch_ = ((num_epochs_ - 1) * epoch_tokens - 1) / seq_length;
  const int64_t samples_per_epoch = (epoch_tokens - 1) / seq_length;
  const int64_t from_last_epoch = samples - samples_before_last_epoch_;
  separate_last_epoch_ =
      from_last_epoch < static_cast<int64_t>(kLastEpochThreshold * static_cast<double>(samples_per_epoch));
}

void GPTDataset::build_document_index(NumpyRandomState& random) {
  const int64_t documents = options_.last - options_.first;
  TORCH_CHECK(documents <= kMaxEntries / num_epochs_, "the ", options_.split_name, " split of \"", source_->name(),
              "\" would repeat ", documents, " documents ", num_epochs_, " times, more than ", kMaxEntries,
              " in all; ask for fewer samples or add data");
  document_index_.resize(static_cast<size_t>(num_epochs_ * documents));
  for (int64_t epoch = 0; epoch < num_epochs_; ++epoch) {
    const auto begin = document_index_.begin() + epoch * documents;
    std::iota(begin, begin + documents, static_cast<int32_t>(options_.first));
  }
  const int64_t together = separate_last_epoch_ ? num_epochs_ - 1 : num_epochs_;
  const std::span<int32_t> all(document_index_);
  random.shuffle(all.first(static_cast<size_t>(together * documents)));
  if (separate_last_epoch_) random.shuffle(all.last(static_cast<size_t>(documents)));
}

void GPTDataset::build_sample_index(int64_t samples) {
  const auto lengths = source_->sequence_lengths();
  sample_index_.reserve(static_cast<size_t>(samples + 1));
  sample_index_.push_back({.document = 0, .offset = 0});
  uint32_t document = 0;
  int64_t offset = 0;
  LongWork work("index", samples, "samples");
  for (int64_t sample = 0; sample < samples; ++sample) {
    if (sample > 0 && sample % kSamplesAtOnce == 0) work.add(kSamplesAtOnce);
    // Samples overlap by one token: if one ends with a document's last token, the next starts at that token.
    int64_t missing = options_.seq_length + 1;
    while (true) {
      const int64_t here = lengths[static_cast<size_t>(document_index_[document])] - offset;
      if (here >= missing) {
        offset += missing - 1;
        break;
      }
      missing -= here;
      ++document;
      offset = 0;
    }
    sample_index_.push_back({.document = document, .offset = static_cast<int32_t>(offset)});
  }
}

void GPTDataset::build_shuffle_index(int64_t samples, NumpyRandomState& random) {
  shuffle_index_.resize(static_cast<size_t>(samples));
  std::iota(shuffle_index_.begin(), shuffle_index_.end(), 0U);
  const auto first = static_cast<size_t>(separate_last_epoch_ ? samples_before_last_epoch_ : samples);
  const std::span<uint32_t> all(shuffle_index_);
  random.shuffle(all.first(first));
  random.shuffle(all.subspan(first));
}

template <class Take>
void GPTDataset::for_each_piece(int64_t index, Take take) const {
  const auto lengths = source_->sequence_lengths();
  const SampleStart start = sample_index_[shuffle_index_[static_cast<size_t>(index)]];
  size_t document = start.document;
  int64_t offset = start.offset;
  for (auto missing = static_cast<size_t>(options_.seq_length) + 1; missing > 0; ++document, offset = 0) {
    const int32_t sequence = document_index_[document];
    const auto here = static_cast<size_t>(lengths[static_cast<size_t>(sequence)] - offset);
    const size_t count = std::min(here, missing);
    take(sequence, offset, count);
    missing -= count;
  }
}

void GPTDataset::read(int64_t index, std::span<int64_t> out) const {
  TORCH_CHECK(index >= 0 && index < size(), "the ", options_.split_name, " split of \"", source_->name(),
              "\" has samples 0 to ", size() - 1, ", got ", index);
  TORCH_CHECK(static_cast<int64_t>(out.size()) == options_.seq_length + 1, "a sample has ", options_.seq_length + 1,
              " tokens, got room for ", out.size());
  for_each_piece(index, [&](int32_t sequence, int64_t offset, size_t count) {
    source_->copy_tokens(sequence, offset, out.first(count));
    out = out.subspan(count);
  });
}

std::string GPTDataset::parts_of(int64_t index) const {
  std::vector<int64_t> documents;
  for_each_piece(index, [&](int32_t sequence, int64_t, size_t count) {
    if (count > 0) documents.push_back(sequence);
  });
  return numbered_parts("document", documents);
}

void GPTDataset::add_facts(int64_t samples, DatasetFacts& facts) const {
  const int64_t tokens = tokens_per_epoch();
  facts.units["document"] += options_.last - options_.first;
  facts.tokens += tokens;
  facts.add_epochs(static_cast<double>(samples * options_.seq_length) / static_cast<double>(tokens));
}

}  // namespace megashard
