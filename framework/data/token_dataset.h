#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// Samples of seq_length + 1 tokens each, of which inputs and labels overlap by all but one. Batches are what
/// megatron.core's GPTDataset returns for them.
class TokenDataset : public SampleDataset {
 public:
  /// out.size() == seq_length + 1.
  virtual void read(int64_t index, std::span<int64_t> out) const = 0;
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const final;
};

}  // namespace megashard
