#include "framework/objectives/aggregation.h"

#include <ATen/TensorOperators.h>

#include <utility>

namespace megashard {

const std::vector<std::string>& aggregation_names() {
  static const std::vector<std::string> names{"token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                                              "seq-mean-token-sum-norm"};
  return names;
}

at::Tensor aggregation_count(Aggregation mode, const Batch& whole) {
  if (mode == Aggregation::kTokenMean) return whole.at(kLossMask).sum();
  return whole.at(kLabelCounts).gt(0).sum().to(at::kFloat);
}

at::Tensor aggregation_weights(Aggregation mode, const Batch& batch, double length) {
  const at::Tensor& mask = batch.at(kLossMask);
  switch (mode) {
    case Aggregation::kTokenMean:
    case Aggregation::kSeqMeanTokenSum:
      break;
    case Aggregation::kSeqMeanTokenMean: {
      const Sequences sequences(batch);
      return mask / sequences.of_tokens(sequences.label_counts().clamp_min(1)).clamp_min(1);
    }
    case Aggregation::kSeqMeanTokenSumNorm: {
      const int64_t whole = batch.sequence.is_whole() ? mask.size(1) : batch.sequence.length;
      return mask / (length == 0 ? static_cast<double>(whole) : length);
    }
  }
  return mask;
}

Loss aggregated_loss(std::string name, Aggregation mode, double length, const at::Tensor& losses, const Batch& batch) {
  const at::Tensor& mask = batch.at(kLossMask);
  const at::Tensor sum = (losses * aggregation_weights(mode, batch, length)).masked_fill(mask == 0, 0).sum();
  const at::Tensor terms =
      mode == Aggregation::kTokenMean ? mask.sum() : aggregation_count(mode, batch) / Sequences(batch).ranks();
  return {.sum = sum,
          .metrics = {{.name = std::move(name), .sum = sum.detach().to(at::kDouble), .count = terms.to(at::kDouble)}}};
}

}  // namespace megashard
