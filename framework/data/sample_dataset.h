#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "framework/batch.h"

namespace megashard {

/// What the samples of a set are cut from, and how often they go through it.
struct DatasetFacts {
  std::map<std::string, int64_t> units{};  ///< how many, by what one is called: "document", "conversation"
  bool has_fixed_length = true;            ///< every sample has seq_length tokens
  int64_t tokens = 0;
  double min_epochs = std::numeric_limits<double>::infinity();  ///< of a blend's members
  double max_epochs = 0;

  void add_epochs(double epochs) {
    min_epochs = std::min(min_epochs, epochs);
    max_epochs = std::max(max_epochs, epochs);
  }
};

/// What a split's dataset takes of a set, and how often.
struct SplitOptions {
  std::string split_name = "train";  ///< for messages
  int64_t first = 0;                 ///< the split's range of documents or conversations, [first, last)
  int64_t last = 0;
  int64_t seq_length = 0;
  int64_t seed = 1234;
  bool shuffles = true;                  ///< conversations only; documents are always shuffled
  bool packs = false;                    ///< conversations only: several to a sample
  int64_t group = 1;                     ///< conversations only: so many neighbours stay together, in order
  std::optional<int64_t> num_samples{};  ///< at least so many; unset: each document or conversation once
};

struct BatchOptions {
  int64_t seq_length = 0;
  int64_t length_multiple = 1;  ///< batches of samples of any length are filled up to a multiple of so many tokens
  int64_t vocab_size = 0;       ///< a token outside [0, vocab_size) is an error
  int64_t eod_id = -1;          ///< end-of-document token; needed by the three flags, which concern documents
  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool pin_memory = false;  ///< page-locked tensors, for copies to a GPU beside compute
};

/// A numbered set of training samples that makes its own batches, as torch.utils.data.Dataset with a collate_fn. A data
/// format with samples of its own kind derives from it; one of token sequences is a TokenSource. Safe to read from
/// several threads.
class SampleDataset {
 public:
  virtual ~SampleDataset() = default;

  virtual int64_t size() const = 0;
  /// Those samples, in that order, as a batch on the CPU: tokens, labels, loss_mask, and what else its kind has. A
  /// token outside the vocabulary throws an error with the data set, the sample and the token.
  virtual Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const = 0;
  /// Where sample `index` comes from, for messages: the path prefix of its files.
  virtual const std::string& source_of(int64_t index) const = 0;
  /// What sample `index` is cut from, for messages: "documents 3, 17"; empty: nobody knows.
  virtual std::string parts_of(int64_t /*index*/) const { return ""; }
  /// Whether any token of it is learnt.
  virtual bool has_labels() const { return true; }
  /// Adds what the first `samples` samples are cut from.
  virtual void add_facts(int64_t samples, DatasetFacts& facts) const = 0;

 protected:
  /// Throws collate()'s message.
  void check_tokens(std::span<const int64_t> tokens, int64_t index, const BatchOptions& options) const;
};

/// "document 3", "documents 3, 17, 5 and 2 more"; `unit`: what one of the numbers is.
std::string numbered_parts(const char* unit, std::span<const int64_t> numbers);

}  // namespace megashard
