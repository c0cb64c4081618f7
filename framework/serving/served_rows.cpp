#include "framework/serving/served_rows.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "framework/data/conversation_dataset.h"

namespace megashard {
namespace {

/// The sequences of each row.
std::vector<std::vector<int64_t>> rows_of_sequences(const std::vector<int64_t>& inputs,
                                                    const ServedRowsOptions& options) {
  if (options.packs) return pack_sequences(inputs, options.seq_length);
  std::vector<std::vector<int64_t>> rows;
  for (int64_t i = 0; i < std::ssize(inputs); ++i) rows.push_back({i});
  return rows;
}

std::vector<int64_t> checked_inputs(const Message& request, const ServedRowsOptions& options) {
  const at::Tensor tokens = request.find("tokens"), lengths = request.find("lengths");
  const auto is_list = [](const at::Tensor& each) {
    return each.defined() && each.scalar_type() == at::kLong && each.dim() == 1 && each.size(0) > 0;
  };
  TORCH_CHECK_VALUE(is_list(tokens) && is_list(lengths),
                    "a request needs \"tokens\", int64, those of all sequences one after the other, and \"lengths\", "
                    "int64, how many each sequence has");
  std::vector<int64_t> inputs(lengths.const_data_ptr<int64_t>(), lengths.const_data_ptr<int64_t>() + lengths.size(0));
  for (int64_t& length : inputs) {
    TORCH_CHECK_VALUE(length > 1 && length <= options.seq_length + 1, "a sequence has ", length,
                      " tokens; it must have from 2 to --seq-length + 1 = ", options.seq_length + 1);
    --length;
  }
  const int64_t sum = std::reduce(inputs.begin(), inputs.end(), std::ssize(inputs));
  TORCH_CHECK_VALUE(sum == tokens.size(0), "\"lengths\" add up to ", sum, ", and there are ", tokens.size(0),
                    " tokens");
  const auto* first = tokens.const_data_ptr<int64_t>();
  const auto* outside = std::find_if(first, first + tokens.size(0),
                                     [&](int64_t token) { return token < 0 || token >= options.vocab_size; });
  TORCH_CHECK_VALUE(outside == first + tokens.size(0), "token ", outside - first, " is ", *outside,
                    ", outside the vocabulary of ", options.vocab_size);
  return inputs;
}

at::Tensor list_of(const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::kLong); }

}  // namespace

ServedRows::ServedRows(const Message& request, const ServedRowsOptions& options) {
  const std::vector<int64_t> inputs = checked_inputs(request, options);
  tokens_ = request.find("tokens");
  temperatures_ = request.column("temperatures", at::kFloat, tokens());
  TORCH_CHECK_VALUE(!temperatures_.defined() || (temperatures_ > 0).all().item<bool>(),
                    "\"temperatures\" must be above 0");
  std::vector<int64_t> begins(inputs.size());
  for (size_t i = 1; i < inputs.size(); ++i) begins[i] = begins[i - 1] + inputs[i - 1] + 1;
  const auto rows = rows_of_sequences(inputs, options);
  rows_ = std::ssize(rows);
  for (const auto& row : rows) {
    int64_t length = 0;
    for (const int64_t sequence : row) length += inputs[static_cast<size_t>(sequence)];
    length_ = std::max(length_, length);
  }
  const int64_t multiple = options.length_multiple;
  length_ = (length_ + multiple - 1) / multiple * multiple;
  std::vector<int64_t> numbers, places, positions, documents;
  for (int64_t row = 0; row < rows_; ++row) {
    int64_t column = 0;
    for (const int64_t sequence : rows[static_cast<size_t>(row)]) {
      const int64_t count = inputs[static_cast<size_t>(sequence)];
      for (int64_t i = 0; i < count; ++i) {
        numbers.push_back(begins[static_cast<size_t>(sequence)] + i);
        places.push_back(row * length_ + column + i);
        positions.push_back(i);
      }
      documents.push_back(count);
      column += count;
    }
    if (column < length_) documents.push_back(length_ - column);
  }
  inputs_ = list_of(numbers);
  places_ = list_of(places);
  if (!options.packs) return;
  positions_ = list_of(positions);
  documents_ = list_of(documents);
}

at::Tensor ServedRows::placed(const at::Tensor& values, const at::Tensor& from) const {
  const at::Tensor all = at::zeros({rows_ * length_}, values.options());
  return all.index_copy_(0, places_, from.defined() ? values.index_select(0, from) : values).view({rows_, length_});
}

Batch ServedRows::batch() const {
  Batch batch;
  batch.set(kTokens, placed(tokens_, inputs_));
  batch.set(kLabels, placed(tokens_, inputs_ + 1));
  batch.set(kTokenMask, placed(at::ones(inputs_.sizes(), at::kBool), {}));
  batch.set(kLossMask, batch.token_mask().to(at::kFloat), Axis::kToken, /*is_input=*/false);
  if (positions_.defined()) batch.set(kPositionIds, placed(positions_, {}));
  // Padding is divided by 1.
  if (temperatures_.defined())
    batch.set(kLogitTemperatures, in_batch(temperatures_) + batch.token_mask().logical_not().to(at::kFloat));
  batch.document_lengths = documents_;
  return batch;
}

at::Tensor ServedRows::in_batch(const at::Tensor& of_tokens) const { return placed(of_tokens, inputs_); }

at::Tensor ServedRows::of_tokens(const at::Tensor& in_batch) const {
  const at::Tensor all = at::zeros({tokens()}, in_batch.options());
  return all.index_copy_(0, inputs_, in_batch.reshape({-1}).index_select(0, places_));
}

}  // namespace megashard
