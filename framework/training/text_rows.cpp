#include "framework/training/text_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace megashard {

at::Tensor padded_texts(const TokenLists& texts, int64_t length) {
  at::Tensor rows = at::zeros({std::max<int64_t>(1, static_cast<int64_t>(texts.size())), length}, at::kLong);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto size = static_cast<int64_t>(texts[i].size());
    TORCH_CHECK(size >= 1 && size <= length, "a text has ", size, " tokens; it must have 1 to ", length);
    std::copy(texts[i].begin(), texts[i].end(), rows[static_cast<int64_t>(i)].mutable_data_ptr<int64_t>());
  }
  return rows;
}

at::Tensor text_lengths(const TokenLists& texts) {
  std::vector<int64_t> lengths;
  for (const auto& text : texts) lengths.push_back(static_cast<int64_t>(text.size()));
  if (lengths.empty()) lengths.push_back(1);
  return at::tensor(lengths, at::kLong);
}

int64_t length_for(int64_t tokens, const InferenceRanks& ranks) {
  const int64_t multiple = ranks.sequence.length_multiple();
  return (tokens + multiple - 1) / multiple * multiple;
}

Batch input_of_rows(const MultiModalModule& model, const at::Tensor& rows, int64_t used, Batch items,
                    const InferenceRanks& ranks) {
  Batch whole = std::move(items);
  whole.set(kTokens, rows);
  if (used < rows.size(1))
    whole.set(kPositionIds, at::arange(rows.size(1), at::kLong).clamp_max(used - 1).expand(rows.sizes()).contiguous());
  whole.sequence = ranks.sequence.with_length(rows.size(1));
  return rows_of_rank(to_device(model.prepared(std::move(whole)), ranks.device));
}

}  // namespace megashard
