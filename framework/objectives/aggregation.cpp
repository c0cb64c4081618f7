#include "framework/objectives/aggregation.h"

#include <ATen/TensorOperators.h>

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

}  // namespace megashard
