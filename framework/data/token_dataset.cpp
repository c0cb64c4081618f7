#include "framework/data/token_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

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

}  // namespace megashard
