#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>

#include "framework/data/conversation_dataset.h"
#include "framework/data/indexed_dataset.h"
#include "framework/training/inference.h"

namespace megashard {

/// Where a conversation's prompt ends.
enum class PromptEnd {
  kFirstAnswer,  ///< before the first learnt token; a conversation without one is a prompt as a whole
  kLastAnswer,   ///< before the last learnt part
};

/// What `megashard infer` and `generate` run a model over: the documents of a .bin/.idx pair, or conversations
/// with pictures (PREFIX.vision.safetensors), whichever has the prefix.
class InferDocuments {
 public:
  /// Texts of at most `seq_length` + 1 tokens from [0, vocab_size).
  InferDocuments(const std::string& prefix, int64_t seq_length, int64_t vocab_size);

  /// Documents [first, last), conversations with their pictures. Throws an error for one that is
  /// too long or empty, or has a token of another vocabulary.
  InferenceBatch read(int64_t first, int64_t last) const;
  /// What read() gave of them, each conversation up to `end`. Throws for one that begins with an answer.
  InferenceBatch prompts(InferenceBatch batch, int64_t first, PromptEnd end) const;
  bool has_pictures() const;
  int64_t size() const;
  int64_t tokens() const;                   ///< of all
  int64_t tokens_of(int64_t number) const;  ///< of a document or conversation
  bool has_conversations() const { return conversations_ != nullptr; }

 private:
  std::vector<int64_t> text_of(int64_t number) const;
  void check(const std::vector<int64_t>& text, int64_t number) const;

  std::string prefix_;
  int64_t seq_length_, vocab_size_;
  std::unique_ptr<IndexedDataset> documents_;  // one of the two
  std::unique_ptr<ConversationSet> conversations_;
};

/// Writes a column of a set of conversations into its file, which appears whole. `values`: float32, one for each token;
/// replaces a column of that name.
void write_column(const std::string& prefix, const std::string& name, const at::Tensor& values);

/// A NumPy array file [rows, columns] of fp32 or int64 that grows row by row (numpy.load).
class NpyFile {
 public:
  /// Creates missing folders. Throws UsageError when the file cannot be written.
  NpyFile(std::string path, at::ScalarType dtype, int64_t columns);
  /// [any, columns] of the dtype, on the CPU.
  void append(const at::Tensor& rows);
  /// Writes how many rows there are. Throws when something could not be written.
  void finish();

 private:
  void write_header();

  std::string path_;
  at::ScalarType dtype_;
  int64_t columns_;
  int64_t rows_ = 0;
  std::ofstream file_;
};

}  // namespace megashard
