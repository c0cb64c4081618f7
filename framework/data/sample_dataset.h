#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "framework/batch.h"

namespace megashard {

/// Size of a set, and the number of epochs that its samples make.
struct DatasetFacts {
  std::map<std::string, int64_t> units{};  ///< number of units by their name: "document", "conversation"
  bool has_fixed_length = true;            ///< every sample has seq_length tokens
  int64_t tokens = 0;
  std::string entry = "token";  ///< name of what `tokens` counts: "latent" of patches
  double min_epochs = std::numeric_limits<double>::infinity();  ///< over the members of a blend
  double max_epochs = 0;

  void add_epochs(double epochs) {
    min_epochs = std::min(min_epochs, epochs);
    max_epochs = std::max(max_epochs, epochs);
  }
};

/// The range of a set that a split's dataset uses, and how.
struct SplitOptions {
  std::string split_name = "train";  ///< for messages
  int64_t first = 0;                 ///< range [first, last) of documents or conversations
  int64_t last = 0;
  int64_t seq_length = 0;
  int64_t seed = 1234;
  bool shuffles = true;                  ///< conversations only; documents are always shuffled
  bool packs = false;                    ///< conversations only: several in a sample
  int64_t group = 1;                     ///< conversations only: number of neighbours that stay together, in order
  bool last_tokens = false;              ///< conversations only: every token is an input, loss_mask marks the last one
  std::optional<int64_t> num_samples{};  ///< minimum number of samples; unset: each document or conversation once
};

struct BatchOptions {
  int64_t seq_length = 0;
  int64_t length_multiple = 1;  ///< batches of samples without a fixed length are padded to a multiple of this
  int64_t vocab_size = 0;       ///< a token outside [0, vocab_size) is an error
  int64_t eod_id = -1;          ///< end-of-document token; the next three flags need it
  bool eod_mask_loss = false;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool pin_memory = false;  ///< page-locked tensors, so that copies to a GPU overlap with compute
};

/// A numbered set of training samples that makes its own batches, as torch.utils.data.Dataset with a collate_fn. Derive
/// from it for a new kind of sample; for a new format of token sequences derive from TokenSource. Safe to read from
/// several threads.
class SampleDataset {
 public:
  virtual ~SampleDataset() = default;

  virtual int64_t size() const = 0;
  /// A batch of these samples, in this order, on the CPU: tokens, labels, loss_mask and the columns of its kind. Throws
  /// if a token is outside the vocabulary; the error names the data set, the sample and the token.
  virtual Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const = 0;
  /// For messages: the path prefix of the files of sample `index`.
  virtual const std::string& source_of(int64_t index) const = 0;
  /// For messages: the documents of sample `index`, as "documents 3, 17"; empty if unknown.
  virtual std::string parts_of(int64_t /*index*/) const { return ""; }
  /// True if the loss of at least one token counts.
  virtual bool has_labels() const { return true; }
  /// Adds the facts of the first `samples` samples.
  virtual void add_facts(int64_t samples, DatasetFacts& facts) const = 0;

 protected:
  /// Throws collate()'s error for a token outside the vocabulary.
  void check_tokens(std::span<const int64_t> tokens, int64_t index, const BatchOptions& options) const;
};

/// "document 3", "documents 3, 17, 5 and 2 more" for the unit "document".
std::string numbered_parts(const char* unit, std::span<const int64_t> numbers);

/// Draws from several datasets in proportion to weights, as megatron.core's BlendedDataset: each sample comes from the
/// dataset that lags most behind its share, the first one on ties. Datasets may be of different kinds.
class BlendedDataset : public SampleDataset {
 public:
  /// Draws `size` samples by `weights`, which are normalised here. If `size` is nullopt: draws each dataset completely,
  /// and stops drawing from a dataset when it is used up. `split_name` is for messages.
  BlendedDataset(std::vector<std::shared_ptr<const SampleDataset>> datasets, std::vector<double> weights,
                 std::optional<int64_t> size, const std::string& split_name);

  int64_t size() const override { return static_cast<int64_t>(dataset_index_.size()); }
  /// Pads rows of different kinds to the longest one. Throws if only some of the rows have position ids or document
  /// lengths (--reset-position-ids, --reset-attention-mask, --neat-packing).
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t index) const override;
  std::string parts_of(int64_t index) const override;
  bool has_labels() const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;

 private:
  void build(const std::vector<double>& weights, int64_t size, bool drops_spent);
  void check_not_oversampled(const std::string& split_name) const;

  std::vector<std::shared_ptr<const SampleDataset>> datasets_;
  std::vector<int64_t> counts_;         // samples taken from each dataset
  std::vector<int16_t> dataset_index_;  // [size]
  std::vector<int64_t> sample_index_;   // [size], sample of that dataset
};

/// Weights divided by numpy's sum of them (megatron.core.datasets.utils.normalize).
std::vector<double> normalized(std::vector<double> weights);

}  // namespace megashard
