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

inline constexpr const char* kConversationsSuffix = ".vision.safetensors";

/// Conversations with images and videos as launch/preprocess/preprocess_data.py --input-format
/// conversations writes them: PREFIX.vision.safetensors, mapped. The constructor checks names,
/// dtypes, sizes and bounds, and throws an error with the file and the remedy.
///   tokens int32 [S], loss_mask uint8 [S]: of all samples, one behind the other
///   sample_ends, image_ends int64 [N]: tokens and images up to the end of each sample
///   image_grid_thw int64 [M, 3]; pixel_values float32 [patches, pixels of a patch]
/// and, where there are videos, which a set may be without:
///   video_ends int64 [N]; video_grid_thw int64 [V, 3]; second_per_grid_ts float32 [V]
///   pixel_values_videos float32 [patches, pixels of a patch]
/// and for objectives any number of columns:
///   column.NAME float32 [S]: a value of each token
class ConversationSet {
 public:
  explicit ConversationSet(const std::string& prefix);
  static bool exists(const std::string& prefix);

  struct Sample {
    std::span<const int32_t> tokens;
    std::span<const uint8_t> loss_mask;           ///< of each token: 1 where it is to be learnt
    at::Tensor image_grids;                       ///< [images, 3] int64
    at::Tensor pixel_values;                      ///< [patches, width], inside the mapping
    at::Tensor video_grids;                       ///< [videos, 3] int64
    at::Tensor pixel_values_videos;               ///< [patches, width]
    at::Tensor second_per_grid;                   ///< [videos] float
    std::vector<std::span<const float>> columns;  ///< in the order of column_names(), a value of each token
  };
  int64_t size() const { return static_cast<int64_t>(sample_ends_.size()); }
  int64_t tokens_of(int64_t sample) const;
  bool has_labels(int64_t sample) const;  ///< loss_mask is not 0 behind the first token
  Sample sample(int64_t sample) const;
  const std::string& prefix() const { return prefix_; }
  const std::vector<std::string>& column_names() const { return column_names_; }

 private:
  struct Pictures {  // images or videos
    at::Tensor grids, pixels;
    std::vector<int64_t> ends;        // of each sample, in pictures
    std::vector<int64_t> patch_ends;  // of each picture
  };
  std::vector<int64_t> read_ends(const std::string& name, int64_t last) const;
  Pictures read_pictures(const std::string& kind, const std::string& pixels_name) const;

  std::string prefix_;
  SafetensorsFile file_;
  at::Tensor tokens_, loss_mask_, second_per_grid_;
  std::vector<int64_t> sample_ends_;
  Pictures images_, videos_;
  std::vector<std::string> column_names_;
  std::vector<at::Tensor> columns_;
};

/// Adds the pictures of `samples` as columns of items: pixel_values, image_grid_thw, pixel_values_videos,
/// video_grid_thw, second_per_grid_ts; a kind that no sample has is left out. Pixels are in page-locked memory if asked
/// for; models read the grids on the host.
void add_pictures(Batch& batch, std::span<const ConversationSet::Sample> samples, bool pin_memory);

/// Conversations of a set in a shuffled order, or in that of the file, epoch after epoch. They have at most seq_length
/// + 1 tokens; longer ones are an error that names the first. A sample is one, or, where `packs` is set, as many whole
/// ones of an epoch as pack_sequences() lays into seq_length: each is a document of the batch, with positions that
/// begin anew and no label of the next one. A batch is as long as its longest sample, what is behind the others a
/// document of its own; its loss_mask and columns are the set's, at the token that they are about, which is the label;
/// the flags about documents do not concern it.
class ConversationDataset : public SampleDataset {
 public:
  ConversationDataset(std::shared_ptr<const ConversationSet> set, const SplitOptions& options);

  int64_t size() const override { return static_cast<int64_t>(sample_ends_.size()); }
  Batch collate(const std::vector<int64_t>& indices, const BatchOptions& options) const override;
  const std::string& source_of(int64_t /*index*/) const override { return set_->prefix(); }
  std::string parts_of(int64_t index) const override;
  bool has_labels() const override;
  void add_facts(int64_t samples, DatasetFacts& facts) const override;
  /// Of sample `index`, one behind the other.
  std::vector<ConversationSet::Sample> conversations(int64_t index) const;

 private:
  std::span<const int64_t> numbers_of(int64_t index) const;
  void add_epoch(const std::vector<int64_t>& epoch, int64_t seq_length);

  std::shared_ptr<const ConversationSet> set_;
  int64_t first_, last_;
  bool packs_;
  std::vector<int64_t> order_;        // of conversations
  std::vector<int64_t> sample_ends_;  // of each sample, in order_
};

}  // namespace megashard
