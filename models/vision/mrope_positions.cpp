#include "models/vision/mrope_positions.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
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

/// Writes the positions of a batch's tokens, one token or picture after the other.
class Positions {
 public:
  Positions(const VisionLanguageConfig& config, int64_t rows, int64_t length, const at::Tensor& seconds_per_frame)
      : is_exact_(config.exact_times),
        rate_(static_cast<float>(config.tokens_per_second.value_or(1))),
        ids_(at::empty({3, rows, length}, at::kFloat)),
        id_(ids_.mutable_data_ptr<float>()),
        tokens_(rows * length) {
    if (config.tokens_per_second && seconds_per_frame.defined())
      seconds_ = seconds_per_frame.to(at::kFloat).contiguous();
  }

  void begin_document() { next_ = 0; }
  void add_text(int64_t token) {
    write(token, {next_, next_, next_});
    next_ += 1;
  }
  void add_picture(int64_t first, const Pictures::Item& item, bool is_video) {
    float last = next_;
    for (int64_t i = 0; i < item.size(); ++i) {
      const auto place = place_of(item, i, is_video);
      write(first + i, place);
      last = std::max(last, place.last());
    }
    next_ = is_exact_ ? last + 1 : next_ + static_cast<float>(std::max(item.rows, item.columns));
  }
  /// A feature of the video goes before one of its sound that is not earlier. The text goes on behind those of the
  /// kind that lasts longer (transformers).
  void add_video_with_sound(int64_t first, const Pictures::Item& item, int64_t sounds) {
    int64_t seen = 0, heard = 0;
    float last = next_;
    while (seen < item.size() || heard < sounds) {
      const float sound = next_ + static_cast<float>(heard);
      auto place = seen < item.size() ? place_of(item, seen, /*is_video=*/true) : Place{};
      const bool is_rest = seen == item.size() || heard == sounds;
      const bool sees = heard == sounds || (seen < item.size() && place.time <= sound);
      if (!sees) place = {sound, sound, sound};
      write(first++, place);
      ++(sees ? seen : heard);
      if (is_rest) last = std::max(last, place.last());
    }
    next_ = last + 1;
  }
  /// Returns [3, B, T] int64, or fp32 if some are not whole numbers.
  at::Tensor ids() const {
    const at::Tensor whole = ids_.to(at::kLong);
    return is_exact_ && !ids_.eq(whole).all().item<bool>() ? ids_ : whole;
  }

 private:
  struct Place {
    float time, height, width;
    float last() const { return std::max({time, height, width}); }
  };

  Place place_of(const Pictures::Item& item, int64_t feature, bool is_video) const {
    const auto frame = static_cast<float>(feature / (item.rows * item.columns));
    const float seconds = is_video && seconds_.defined() ? seconds_.const_data_ptr<float>()[item.number] : 1;
    float time = frame;  // in the order of transformers' products in fp32
    if (is_video) time = is_exact_ ? frame * seconds * rate_ : std::trunc(frame * (rate_ * seconds));
    return {next_ + time, next_ + static_cast<float>(feature / item.columns % item.rows),
            next_ + static_cast<float>(feature % item.columns)};
  }
  void write(int64_t token, const Place& place) {
    id_[token] = place.time;
    id_[tokens_ + token] = place.height;
    id_[2 * tokens_ + token] = place.width;
  }

  bool is_exact_;
  float rate_;
  at::Tensor ids_;
  float* id_;
  int64_t tokens_;
  at::Tensor seconds_;
  float next_ = 0;  // position of what comes next
};

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
  Positions positions(config, rows, length, grids.seconds_per_frame);

  const auto documents = Documents::of(document_lengths, rows, length, /*in_ring=*/false, at::kCPU);
  const auto lengths = documents ? documents->lengths : std::vector<int64_t>(static_cast<size_t>(rows), length);
  int64_t begin = 0;
  for (const int64_t document_length : lengths) {
    positions.begin_document();
    const int64_t end = begin + document_length;
    const auto run_of = [&](int64_t first, const auto& belongs) {
      int64_t count = 0;
      while (first + count < end && belongs(token[first + count])) ++count;
      return count;
    };
    for (int64_t first = begin; first < end;) {
      if (const auto& sound = config.sound; sound && first + 1 < end && token[first] == sound->vision_start &&
                                            token[first + 1] == sound->audio_start) {
        positions.add_text(first++);
        positions.add_text(first++);
        const auto is_video = [&](int64_t each) { return videos.is_placeholder(each); };
        const int64_t count = run_of(first, [&](int64_t each) { return is_video(each) || each == sound->audio; });
        const int64_t seen = std::count_if(token + first, token + first + count, is_video);
        const auto& item = videos.take(seen, first / length, first % length);
        for (int64_t i = first; i < first + count; ++i) {
          if (is_video(token[i])) videos.add_token_indices(i, 1);
        }
        positions.add_video_with_sound(first, item, count - seen);
        first += count;
        continue;
      }
      const bool image = images.is_placeholder(token[first]);
      if (!image && !videos.is_placeholder(token[first])) {
        positions.add_text(first++);
        continue;
      }
      auto& pictures = image ? images : videos;
      const int64_t room = run_of(first, [&](int64_t each) { return each == token[first]; });
      const auto& item = pictures.take(room, first / length, first % length);
      positions.add_picture(first, item, /*is_video=*/!image);
      pictures.add_token_indices(first, item.size());
      first += item.size();
    }
    begin = end;
  }
  images.check_all_taken();
  videos.check_all_taken();
  auto token_indices = images.token_indices();
  token_indices.insert(token_indices.end(), videos.token_indices().begin(), videos.token_indices().end());
  return {.position_ids = positions.ids(), .token_indices = index_of(token_indices)};
}

at::Tensor rows_of_items(const at::Tensor& rows, const at::Tensor& counts, const std::vector<bool>& marks,
                         int64_t first) {
  const auto* const count = counts.const_data_ptr<int64_t>();
  std::vector<at::Tensor> runs;  // views of the marked items
  int64_t begin = 0, end = 0;
  const auto take = [&] {
    if (end > begin) runs.push_back(rows.narrow(0, begin, end - begin));
  };
  for (int64_t i = 0; i < counts.size(0); ++i) {
    if (marks[static_cast<size_t>(first + i)]) {
      end += count[i];
      continue;
    }
    take();
    end += count[i];
    begin = end;
  }
  take();
  if (runs.empty()) return {};
  return runs.size() == 1 ? runs[0] : at::cat(runs);
}

OwnItems items_in_rows(const at::Tensor& token_indices, const at::Tensor& features_of, const SequenceShard& shard) {
  const auto row_of = at::full({shard.length}, -1, at::kLong);  // of a column; -1: another rank's
  shard.rows_of(row_of, 0).copy_(at::arange(shard.rows()));
  const auto* const row = row_of.const_data_ptr<int64_t>();
  const auto* token_index = token_indices.const_data_ptr<int64_t>();
  const auto* const count = features_of.const_data_ptr<int64_t>();
  OwnItems own;
  std::vector<int64_t> features, own_indices;
  int64_t taken = 0;  // features of the items before
  for (int64_t item = 0; item < features_of.size(0); ++item) {
    const auto before = features.size();
    for (int64_t i = 0; i < count[item]; ++i, ++token_index) {
      const int64_t own_row = row[*token_index % shard.length];
      if (own_row < 0) continue;
      features.push_back(taken + i);
      own_indices.push_back(*token_index / shard.length * shard.rows() + own_row);
    }
    own.items.push_back(features.size() > before);
    if (own.items.back()) taken += count[item];
  }
  own.features = index_of(features);
  own.token_indices = index_of(own_indices);
  return own;
}

}  // namespace megashard
