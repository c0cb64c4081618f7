#pragma once

#include <vector>

#include "framework/data/gpt_dataset.h"

namespace megashard {

/// The token source of --mock-data, as Megatron's MockGPTLowLevelDataset: 100000 sequences of 1 to 4095 tokens, with
/// lengths from numpy's default_rng(0). Each sequence is 1, 2, 3, ... modulo the vocabulary size and ends with the
/// end-of-document token.
class MockTokens : public TokenSource {
 public:
  MockTokens(int64_t vocab_size, int64_t eod_id);

  std::span<const int32_t> sequence_lengths() const override { return lengths_; }
  void copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const override;
  const std::string& name() const override { return name_; }

 private:
  int64_t vocab_size_;
  int64_t eod_id_;
  std::string name_ = "mock data";
  std::vector<int32_t> lengths_;
};

}  // namespace megashard
