#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "framework/data/sample_dataset.h"

namespace megashard {

/// Numbered sequences of token ids, from which a dataset cuts its samples (Megatron's low-level dataset). Safe to read
/// from several threads.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// Number of tokens of each sequence.
  virtual std::span<const int32_t> sequence_lengths() const = 0;

  /// Copies tokens [offset, offset + out.size()) of one sequence.
  virtual void copy_tokens(int64_t sequence, int64_t offset, std::span<int64_t> out) const = 0;

  /// For messages: the path prefix of the files, or "mock data".
  virtual const std::string& name() const = 0;
};

/// Samples of seq_length + 1 tokens: inputs are all but the last, labels all but the first. Batches equal those of
/// megatron.core's GPTDataset.
class TokenDataset : public SampleDataset {
 public:
  /// out.size() == seq_length + 1.
  virtual void read(int64_t index, std::span<int64_t> out) const = 0;
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const final;
};

/// Cuts samples of seq_length + 1 tokens from the shuffled documents of one split, in the exact order of
/// megatron.core.datasets.gpt_dataset.GPTDataset (add_extra_token_to_sequence and drop_last_partial at their defaults).
/// The constructor builds the indices; they stay in memory: 4 bytes a document and epoch, 12 bytes a sample.
class GPTDataset : public TokenDataset {
 public:
  /// Throws if the range has too few tokens for a sample; the error names the split.
  GPTDataset(std::shared_ptr<const TokenSource> source, SplitOptions options);

  int64_t size() const override { return static_cast<int64_t>(shuffle_index_.size()); }
  void read(int64_t index, std::span<int64_t> out) const override;
  const std::string& source_of(int64_t) const override { return source_->name(); }
  std::string parts_of(int64_t index) const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;

  int64_t num_epochs() const { return num_epochs_; }
  /// True if the last epoch is shuffled separately from the others (the 80% rule).
  bool separate_last_epoch() const { return separate_last_epoch_; }

 private:
  struct SampleStart {
    uint32_t document;  // position in document_index_
    int32_t offset;     // token in that document
  };

  int64_t tokens_per_epoch() const;
  /// Calls `take(sequence, offset, tokens)` for each piece of sample `index`.
  template <class Take>
  void for_each_piece(int64_t index, Take take) const;
  void plan_epochs(int64_t epoch_tokens);
  void build_document_index(class NumpyRandomState& random);
  void build_sample_index(int64_t samples);
  void build_shuffle_index(int64_t samples, class NumpyRandomState& random);

  std::shared_ptr<const TokenSource> source_;
  SplitOptions options_;
  int64_t num_epochs_ = 1;
  bool separate_last_epoch_ = false;
  int64_t samples_before_last_epoch_ = 0;
  std::vector<int32_t> document_index_;    // [epochs * sequences] sequence numbers
  std::vector<SampleStart> sample_index_;  // [samples + 1]
  std::vector<uint32_t> shuffle_index_;    // [samples]
};

}  // namespace megashard
