#include "models/vision/mrope_positions.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "models/layers/pass.h"

namespace megashard {
namespace {

/// The part of a picture whose tokens stand side by side.
enum class Whole { kPicture, kFrame, kRow };

/// Takes the pictures of one kind one after the other.
class Pictures {
 public:
  Pictures(const at::Tensor& grids, std::string kind, int64_t token, int64_t merge, Whole whole)
      : kind_(std::move(kind)), token_(token) {
    if (!grids.defined()) return;
    const auto dense = grids.contiguous();
    const auto* value = dense.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < dense.size(0); ++i, value += 3) {
      const int64_t frames = value[0], rows = value[1] / merge, columns = value[2] / merge;
      const Item item{i, whole == Whole::kPicture ? frames : 1, whole == Whole::kRow ? 1 : rows, columns};
      items_.insert(items_.end(), static_cast<size_t>(frames * rows * columns / item.size()), item);
    }
  }

  struct Item {
    int64_t number;                 // of the picture
    int64_t frames, rows, columns;  // of features
    int64_t size() const { return frames * rows * columns; }
  };

  bool is_placeholder(int64_t token) const { return token == token_; }
  /// The next one, for `room` placeholders that begin at the given token.
  const Item& take(int64_t room, int64_t row, int64_t column) {
    TORCH_CHECK(next_ < items_.size(), "row ", row, " has a place for a further ", kind_, " (token ", token_, ") at ",
                column, ", but ", grid_name(), " describes no more: give one grid for each ", kind_,
                " of the text, in its order");
    const Item& item = items_[next_++];
    TORCH_CHECK(item.size() <= room, kind_, " ", item.number, " of ", grid_name(), " has ", item.size(),
                " features, but only ", room, " tokens ", token_, " stand for it in row ", row, " at ", column,
                ": tokenise the text by the model's own processor, and do not cut it inside a picture");
    return item;
  }
  void check_all_taken() const {
    TORCH_CHECK(next_ == items_.size(), grid_name(), " describes ", items_.size(), " ", kind_,
                " parts, but the tokens have places (", token_, ") for ", next_,
                ": give the pictures of the text and no others");
  }
  void add_token_indices(int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) token_indices_.push_back(first + i);
  }
  const std::vector<int64_t>& token_indices() const { return token_indices_; }

 private:
  std::string grid_name() const { return kind_ + "_grid_thw"; }

  std::string kind_;
  int64_t token_;
  std::vector<Item> items_;
  std::vector<int64_t> token_indices_;
  size_t next_ = 0;
};

at::Tensor index_of(const std::vector<int64_t>& values) {
  auto index = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), index.mutable_data_ptr<int64_t>());
  return index;
}

}  // namespace

PicturePlaces place_pictures(const VisionLanguageConfig& config, const at::Tensor& tokens, const PictureGrids& grids,
                             const at::Tensor& document_lengths) {
  const int64_t merge = config.vision.merge_size;
  Pictures images(grids.images, "image", config.image_token_id, merge,
                  config.rows_apart ? Whole::kRow : Whole::kPicture);
  Pictures videos(grids.videos, "video", config.video_token_id, merge,
                  config.tokens_per_second ? Whole::kPicture : Whole::kFrame);
  const auto dense = tokens.contiguous();
  const auto* token = dense.const_data_ptr<int64_t>();
  const int64_t rows = tokens.size(0), length = tokens.size(1);
  PicturePlaces result;
  result.position_ids = at::empty({3, rows, length}, at::kLong);
  auto* const time = result.position_ids.mutable_data_ptr<int64_t>();
  auto* const height = time + rows * length;
  auto* const width = height + rows * length;
  const auto seconds =
      grids.seconds_per_frame.defined() ? grids.seconds_per_frame.to(at::kFloat).contiguous() : at::Tensor();

  const auto documents = Documents::of(document_lengths, rows, length, /*in_ring=*/false, at::kCPU);
  const auto lengths = documents ? documents->lengths : std::vector<int64_t>(static_cast<size_t>(rows), length);
  int64_t begin = 0;
  for (const int64_t document_length : lengths) {
    int64_t next_position = 0;
    const int64_t end = begin + document_length;
    for (int64_t first = begin; first < end;) {
      const bool image = images.is_placeholder(token[first]);
      if (!image && !videos.is_placeholder(token[first])) {
        time[first] = height[first] = width[first] = next_position++;
        ++first;
        continue;
      }
      auto& pictures = image ? images : videos;
      int64_t room = 1;
      while (first + room < end && token[first + room] == token[first]) ++room;
      const auto& item = pictures.take(room, first / length, first % length);
      float interval = 1;  // as transformers computes it, in fp32
      if (!image && config.tokens_per_second) {
        interval = static_cast<float>(*config.tokens_per_second);
        if (seconds.defined()) interval *= seconds.const_data_ptr<float>()[item.number];
      }
      for (int64_t i = 0; i < item.size(); ++i) {
        const int64_t frame = i / (item.rows * item.columns);
        time[first + i] = next_position + static_cast<int64_t>(static_cast<float>(frame) * interval);
        height[first + i] = next_position + i / item.columns % item.rows;
        width[first + i] = next_position + i % item.columns;
      }
      pictures.add_token_indices(first, item.size());
      next_position += std::max(item.rows, item.columns);
      first += item.size();
    }
    begin = end;
  }
  images.check_all_taken();
  videos.check_all_taken();
  auto token_indices = images.token_indices();
  token_indices.insert(token_indices.end(), videos.token_indices().begin(), videos.token_indices().end());
  result.token_indices = index_of(token_indices);
  return result;
}

OwnPictures pictures_in_rows(const at::Tensor& token_indices, const at::Tensor& features_of,
                             const SequenceShard& shard) {
  const auto row_of = at::full({shard.length}, -1, at::kLong);  // of a column; -1: another rank's
  shard.rows_of(row_of, 0).copy_(at::arange(shard.rows()));
  const auto* const row = row_of.const_data_ptr<int64_t>();
  const auto* token_index = token_indices.const_data_ptr<int64_t>();
  const auto* const count = features_of.const_data_ptr<int64_t>();
  OwnPictures own;
  std::vector<int64_t> features, own_indices;
  int64_t taken = 0;  // features of the pictures before
  for (int64_t picture = 0; picture < features_of.size(0); ++picture) {
    const auto before = features.size();
    for (int64_t i = 0; i < count[picture]; ++i, ++token_index) {
      const int64_t own_row = row[*token_index % shard.length];
      if (own_row < 0) continue;
      features.push_back(taken + i);
      own_indices.push_back(*token_index / shard.length * shard.rows() + own_row);
    }
    own.pictures.push_back(features.size() > before);
    if (own.pictures.back()) taken += count[picture];
  }
  own.features = index_of(features);
  own.token_indices = index_of(own_indices);
  return own;
}

}  // namespace megashard
