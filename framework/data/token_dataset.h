#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// Samples of seq_length + 1 tokens: inputs are all but the last, labels all but the first. Batches equal those of
/// megatron.core's GPTDataset.
class TokenDataset : public SampleDataset {
 public:
  /// out.size() == seq_length + 1.
  virtual void read(int64_t index, std::span<int64_t> out) const = 0;
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const final;
};

}  // namespace megashard
