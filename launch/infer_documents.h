#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "framework/data/indexed_dataset.h"
#include "framework/data/picture_dataset.h"
#include "framework/training/inference.h"

namespace megashard {

/// What `megashard infer` runs a model over: the documents of a .bin/.idx pair, or conversations
/// with pictures (PREFIX.vision.safetensors), whichever has the prefix.
class InferDocuments {
 public:
  /// Texts of at most `seq_length` + 1 tokens from [0, vocab_size).
  InferDocuments(const std::string& prefix, int64_t seq_length, int64_t vocab_size);

  struct Some {
    TokenLists texts;
    std::map<std::string, at::Tensor> pictures;  ///< of ModelInput::extra; empty: they have none
  };
  /// Documents [first, last). Throws a sentence for one that is too long or empty, or has a
  /// token of another vocabulary.
  Some read(int64_t first, int64_t last) const;
  int64_t size() const;
  int64_t tokens() const;  ///< of all
  bool are_conversations() const { return conversations_ != nullptr; }

 private:
  std::vector<int64_t> text_of(int64_t number) const;
  void check(const std::vector<int64_t>& text, int64_t number) const;

  std::string prefix_;
  int64_t seq_length_, vocab_size_;
  std::unique_ptr<IndexedDataset> documents_;  // one of the two
  std::unique_ptr<PictureSet> conversations_;
};

}  // namespace megashard
