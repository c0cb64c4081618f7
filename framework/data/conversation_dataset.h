#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/hugging_face/safetensors.h"
#include "framework/data/sample_dataset.h"

namespace megashard {

/// Packs whole sequences into rows of at most `capacity` tokens, by best fit in the given order: each sequence goes
/// into the row with the least room that fits (the earlier row on ties), or starts a new row. `lengths` must be in
/// [1, capacity]. Returns the indices into `lengths` of each row, ascending in a row; rows are in the order in which
/// they were started. Deterministic.
std::vector<std::vector<int64_t>> pack_sequences(std::span<const int64_t> lengths, int64_t capacity);

inline constexpr const char* kConversationsSuffix = ".vision.safetensors";

/// Conversations with images and videos as launch/preprocess/preprocess_data.py --input-format
/// conversations writes them: PREFIX.vision.safetensors, mapped. The constructor checks names,
/// dtypes, sizes and bounds, and throws an error with the file and the remedy.
///   tokens int32 [S], loss_mask uint8 [S]: all samples, concatenated
///   sample_ends int64 [N]: tokens up to the end of each sample
/// and, if the set has images:
///   image_ends int64 [N]; image_grid_thw int64 [M, 3]; pixel_values float32 [patches, pixels of a patch]
/// and, if it has videos:
///   video_ends int64 [N]; video_grid_thw int64 [V, 3]; second_per_grid_ts float32 [V]
///   pixel_values_videos float32 [patches, pixels of a patch]
/// and any number of columns for objectives:
///   column.NAME float32 [S]: one value for each token; or float32, int32 or int64 [S, K]: K for each token, which a
///   batch has as [K, B, T]
///   conversation.NAME float32 [N]: one value for each sample
/// and any number of kinds of items for a model's encoder:
///   items.NAME float32 or int64 [items, ...]; item_ends.NAME int64 [N]
class ConversationSet {
 public:
  explicit ConversationSet(const std::string& prefix);
  static bool exists(const std::string& prefix);

  struct Sample {
    std::span<const int32_t> tokens;
    std::span<const uint8_t> loss_mask;  ///< 1 for tokens whose loss counts
    std::vector<at::Tensor> columns;  ///< in the order of column_names(), inside the mapping: [tokens] or [tokens, K]
    std::vector<at::Tensor> items;    ///< [items of the sample, ...] of each kind, inside the mapping, as items()
  };
  int64_t size() const { return static_cast<int64_t>(sample_ends_.size()); }
  int64_t tokens_of(int64_t sample) const;
  bool has_labels(int64_t sample) const;  ///< loss_mask is 1 for a token after the first
  Sample sample(int64_t sample) const;
  const std::string& prefix() const { return prefix_; }
  const std::vector<std::string>& column_names() const { return column_names_; }
  /// A column of all tokens, by its place among the names: [S] or [S, K].
  const at::Tensor& column(size_t place) const { return columns_[place]; }
  /// A column of Axis::kItem. Pictures are some: image_grid_thw, pixel_values, video_grid_thw ...
  struct Items {
    std::string name;
    at::Tensor values;          ///< [items, ...], inside the mapping
    std::vector<int64_t> ends;  ///< number of items up to the end of each sample
    bool is_host_data = false;  ///< read by models on the host, so never in page-locked memory
    bool is_input = true;       ///< Column::is_input
  };
  const std::vector<Items>& items() const { return items_; }

 private:
  std::vector<int64_t> read_ends(const std::string& name, int64_t last) const;
  /// Reads the ends of items of the samples.
  std::vector<int64_t> read_item_ends(const std::string& name, int64_t items) const;
  void read_items();
  /// Reads pictures of a kind: KIND_grid_thw and, as far as the grids say, their patches in `pixels_name`.
  void read_pictures(const std::string& kind, const std::string& pixels_name);
  void read_times_of_videos();

  std::string prefix_;
  SafetensorsFile file_;
  at::Tensor tokens_, loss_mask_;
  std::vector<int64_t> sample_ends_;
  std::vector<std::string> column_names_;
  std::vector<at::Tensor> columns_;
  std::vector<Items> items_;
};

/// Adds the items of `samples` of `set` to the batch. Omits a column for which no sample has data.
void add_items(Batch& batch, const ConversationSet& set, std::span<const ConversationSet::Sample> samples,
               bool pin_memory);

/// Conversations of a set, epoch after epoch, shuffled or in the order of the file. Throws if a conversation has fewer
/// than 2 or more than seq_length + 1 tokens. A sample is one conversation. With `packs` it is several conversations of
/// one epoch, packed into seq_length by pack_sequences(): each is a document of the batch, its positions start at 0,
/// and no label crosses into the next. A batch is as long as its longest sample, rounded up to length_multiple; with
/// `packs` the padding of a row is a document, too; neighbours that stay together are in one row. loss_mask and columns
/// are shifted like labels: entry i belongs to token i + 1. With `last_tokens` a conversation's last token is an input,
/// too, with label 0 and zeros in the columns, and loss_mask is 1 for it alone; a conversation then has at most
/// seq_length tokens. The flags about documents have no effect.
class ConversationDataset : public SampleDataset {
 public:
  ConversationDataset(std::shared_ptr<const ConversationSet> set, const SplitOptions& options);

  int64_t size() const override { return static_cast<int64_t>(sample_ends_.size()); }
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t /*index*/) const override { return set_->prefix(); }
  std::string parts_of(int64_t index) const override;
  bool has_labels() const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;
  /// The conversations of sample `index`, in order.
  std::vector<ConversationSet::Sample> conversations(int64_t index) const;

 private:
  std::span<const int64_t> numbers_of(int64_t index) const;
  /// How many of a conversation's tokens are inputs.
  int64_t inputs_of(int64_t tokens) const { return last_tokens_ ? tokens : tokens - 1; }
  /// Adds the groups of an epoch: of conversations first, first + 1, ...
  void add_epoch(const std::vector<int64_t>& firsts, const SplitOptions& options);

  std::shared_ptr<const ConversationSet> set_;
  int64_t first_, last_;
  bool packs_, last_tokens_;
  std::vector<int64_t> order_;        // conversation numbers of all epochs
  std::vector<int64_t> sample_ends_;  // end of each sample in order_
};

}  // namespace megashard
