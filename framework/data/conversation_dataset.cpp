#include "framework/data/conversation_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "framework/data/numpy_random.h"

namespace megashard {

std::vector<std::vector<int64_t>> pack_sequences(std::span<const int64_t> lengths, int64_t capacity) {
  std::vector<std::vector<int64_t>> rows;
  std::set<std::pair<int64_t, size_t>> rooms;  // rows with room: (tokens left, row)
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto best = rooms.lower_bound({lengths[i], 0});
    const auto [room, row] = best == rooms.end() ? std::pair(capacity, rows.size()) : *best;
    if (best == rooms.end()) {
      rows.emplace_back();
    } else {
      rooms.erase(best);
    }
    rows[row].push_back(static_cast<int64_t>(i));
    if (room > lengths[i]) rooms.emplace(room - lengths[i], row);
  }
  return rows;
}

namespace {

constexpr std::string_view kColumnPrefix = "column.", kItemsPrefix = "items.", kConversationPrefix = "conversation.";

std::string file_of(const std::string& prefix) { return prefix + kConversationsSuffix; }

at::Tensor need_tensor(const SafetensorsFile& file, const std::string& name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(file.contains(name), file.path(), " has no ", name,
              ": it is no set of conversations; write it by preprocess_data.py --input-format conversations");
  const auto& info = file.info(name);
  TORCH_CHECK(info.dtype == dtype && static_cast<int64_t>(info.sizes.size()) == dims, file.path(), ": ", name,
              " must be ", dtype, " with ", dims, " dimensions, got ", info.dtype, " ", c10::IntArrayRef(info.sizes),
              "; write it by preprocess_data.py --input-format conversations");
  return file.tensor(name);
}

at::Tensor need_column(const SafetensorsFile& file, const std::string& name, int64_t tokens) {
  const auto& info = file.info(name);
  const bool is_integer = info.dtype == at::kInt || info.dtype == at::kLong;
  const bool fits = info.sizes.size() == 2 ? is_integer || info.dtype == at::kFloat
                                           : info.sizes.size() == 1 && info.dtype == at::kFloat;
  TORCH_CHECK(fits && info.sizes[0] == tokens, file.path(), ": ", name, " must have a value for each of the ", tokens,
              " tokens, float32, or several, [tokens, K] of float32, int32 or int64; got ", info.dtype, " ",
              c10::IntArrayRef(info.sizes));
  return file.tensor(name);
}

/// Writes a conversation to a row of the batch, from token `begin` on. The last token is only a label, or with
/// `last_tokens` an input, and the one that loss_mask marks.
void write_conversation(const ConversationSet::Sample& sample, const std::vector<std::string>& names,
                        const Batch& batch, int64_t row, int64_t begin, bool last_tokens) {
  const size_t labels_count = sample.tokens.size() - 1, count = labels_count + (last_tokens ? 1 : 0);
  const int64_t first = row * batch.tokens().size(1) + begin;
  auto* tokens = batch.tokens().mutable_data_ptr<int64_t>() + first;
  auto* labels = batch.labels().mutable_data_ptr<int64_t>() + first;
  auto* mask = batch.at(kLossMask).mutable_data_ptr<float>() + first;
  for (size_t i = 0; i < labels_count; ++i) {
    tokens[i] = sample.tokens[i];
    labels[i] = sample.tokens[i + 1];
    mask[i] = last_tokens || sample.loss_mask[i + 1] == 0 ? 0.0F : 1.0F;
  }
  if (last_tokens) {
    tokens[labels_count] = sample.tokens.back();
    mask[labels_count] = 1.0F;
  }
  for (size_t column = 0; column < sample.columns.size(); ++column) {
    const at::Tensor values = sample.columns[column].slice(0, 1);
    const at::Tensor place = batch.at(names[column]).select(-2, row).narrow(-1, begin, values.size(0));
    place.copy_(values.dim() == 2 ? values.t() : values);
  }
  std::fill_n(batch.token_mask().mutable_data_ptr<bool>() + first, count, true);
  const at::Tensor position_ids = batch.position_ids();
  if (!position_ids.defined()) return;
  auto* positions = position_ids.mutable_data_ptr<int64_t>() + first;
  std::iota(positions, positions + count, int64_t{0});
}

}  // namespace

bool ConversationSet::exists(const std::string& prefix) { return std::filesystem::exists(file_of(prefix)); }

ConversationSet::ConversationSet(const std::string& prefix) : prefix_(prefix), file_(file_of(prefix)) {
  tokens_ = need_tensor(file_, "tokens", at::kInt, 1);
  loss_mask_ = need_tensor(file_, "loss_mask", at::kByte, 1);
  TORCH_CHECK(loss_mask_.size(0) == tokens_.size(0), file_.path(), ": loss_mask must have the size of tokens");
  sample_ends_ = read_ends("sample_ends", tokens_.size(0));
  TORCH_CHECK(!sample_ends_.empty(), file_.path(), ": sample_ends must not be empty");
  for (const auto& info : file_.tensors()) {
    if (!info.name.starts_with(kColumnPrefix)) continue;
    columns_.push_back(need_column(file_, info.name, tokens_.size(0)));
    column_names_.push_back(info.name.substr(kColumnPrefix.size()));
  }
  read_items();
  if (file_.contains("image_ends") || file_.contains("image_grid_thw") || file_.contains("pixel_values"))
    read_pictures("image", "pixel_values");
  if (file_.contains("video_ends") || file_.contains("video_grid_thw")) {
    read_pictures("video", "pixel_values_videos");
    read_times_of_videos();
  }
}

std::vector<int64_t> ConversationSet::read_item_ends(const std::string& name, int64_t items) const {
  auto ends = read_ends(name, items);
  TORCH_CHECK(ends.size() == sample_ends_.size(), file_.path(), ": sample_ends and ", name, " must be of one size");
  return ends;
}

void ConversationSet::read_items() {
  for (const auto& info : file_.tensors()) {
    if (info.name.starts_with(kConversationPrefix)) {
      const auto name = info.name.substr(kConversationPrefix.size());
      const at::Tensor values = need_tensor(file_, info.name, at::kFloat, 1);
      TORCH_CHECK(values.size(0) == size(), file_.path(), ": ", info.name, " must have a value for each of the ",
                  size(), " conversations");
      std::vector<int64_t> ends(sample_ends_.size());
      std::iota(ends.begin(), ends.end(), int64_t{1});
      items_.push_back({.name = name, .values = values, .ends = std::move(ends), .is_input = false});
    }
    if (!info.name.starts_with(kItemsPrefix)) continue;
    const auto name = info.name.substr(kItemsPrefix.size());
    TORCH_CHECK((info.dtype == at::kFloat || info.dtype == at::kLong) && !info.sizes.empty(), file_.path(), ": ",
                info.name, " must be float32 or int64 of sizes [items, ...], got ", info.dtype, " ",
                c10::IntArrayRef(info.sizes));
    items_.push_back(
        {.name = name, .values = file_.tensor(info.name), .ends = read_item_ends("item_ends." + name, info.sizes[0])});
  }
}

void ConversationSet::read_pictures(const std::string& kind, const std::string& pixels_name) {
  const auto grid_name = kind + "_grid_thw";
  const at::Tensor grids = need_tensor(file_, grid_name, at::kLong, 2);
  const at::Tensor pixels = need_tensor(file_, pixels_name, at::kFloat, 2);
  TORCH_CHECK(grids.size(1) == 3, file_.path(), ": ", grid_name, " must have three columns");
  auto ends = read_item_ends(kind + "_ends", grids.size(0));
  const auto* grid = grids.const_data_ptr<int64_t>();
  std::vector<int64_t> patches{0};  // up to the end of each picture
  for (int64_t picture = 0; picture < grids.size(0); ++picture, grid += 3) {
    constexpr int64_t kMax = int64_t{1} << 20;  // the product of three grid sizes cannot overflow
    for (int i = 0; i < 3; ++i) {
      TORCH_CHECK(grid[i] > 0 && grid[i] < kMax, file_.path(), ": ", kind, " ", picture, " has a grid with ", grid[i],
                  "; the file is damaged, write it again");
    }
    patches.push_back(patches.back() + grid[0] * grid[1] * grid[2]);
    TORCH_CHECK(patches.back() <= pixels.size(0), file_.path(), ": ", grid_name, " describes more patches than the ",
                pixels.size(0), " of ", pixels_name, "; the file is damaged, write it again");
  }
  TORCH_CHECK(patches.back() == pixels.size(0), file_.path(), ": ", grid_name, " describes ", patches.back(),
              " patches, ", pixels_name, " has ", pixels.size(0), "; the file is damaged, write it again");
  std::vector<int64_t> patch_ends;
  for (const int64_t end : ends) patch_ends.push_back(patches[static_cast<size_t>(end)]);
  items_.push_back({.name = grid_name, .values = grids, .ends = std::move(ends), .is_host_data = true});
  items_.push_back({.name = pixels_name, .values = pixels, .ends = std::move(patch_ends)});
}

void ConversationSet::read_times_of_videos() {
  const std::string name = "second_per_grid_ts";
  const at::Tensor times = need_tensor(file_, name, at::kFloat, 1);
  const auto videos = std::ranges::find(items_, "video_grid_thw", &Items::name);
  TORCH_CHECK(times.size(0) == videos->values.size(0), file_.path(), ": ", name,
              " must have one value for each of the ", videos->values.size(0), " videos, not ", times.size(0),
              "; the file is damaged, write it again");
  items_.push_back({.name = name, .values = times, .ends = std::vector(videos->ends), .is_host_data = true});
}

std::vector<int64_t> ConversationSet::read_ends(const std::string& name, int64_t last) const {
  const auto tensor = need_tensor(file_, name, at::kLong, 1);
  const auto* value = tensor.const_data_ptr<int64_t>();
  std::vector<int64_t> ends(value, value + tensor.size(0));
  int64_t before = 0;
  for (const auto end : ends) {
    TORCH_CHECK(end >= before, file_.path(), ": ", name, " goes back from ", before, " to ", end,
                "; the file is damaged, write it again");
    before = end;
  }
  TORCH_CHECK(before == last, file_.path(), ": ", name, " ends at ", before, " instead of ", last,
              "; the file is damaged, write it again");
  return ends;
}

int64_t ConversationSet::tokens_of(int64_t sample) const {
  const auto at = static_cast<size_t>(sample);
  return sample_ends_[at] - (at == 0 ? 0 : sample_ends_[at - 1]);
}

bool ConversationSet::has_labels(int64_t sample) const {
  const uint8_t* end = loss_mask_.const_data_ptr<uint8_t>() + sample_ends_[static_cast<size_t>(sample)];
  const int64_t tokens = tokens_of(sample);
  return tokens > 1 && std::any_of(end - tokens + 1, end, [](uint8_t mask) { return mask != 0; });
}

ConversationSet::Sample ConversationSet::sample(int64_t sample) const {
  const auto at = static_cast<size_t>(sample);
  const int64_t count = tokens_of(sample), first_token = sample_ends_[at] - count;
  Sample result{.tokens = {tokens_.const_data_ptr<int32_t>() + first_token, static_cast<size_t>(count)},
                .loss_mask = {loss_mask_.const_data_ptr<uint8_t>() + first_token, static_cast<size_t>(count)},
                .columns = {},
                .items = {}};
  for (const at::Tensor& column : columns_) result.columns.push_back(column.narrow(0, first_token, count));
  for (const Items& each : items_) {
    const int64_t first = at == 0 ? 0 : each.ends[at - 1];
    result.items.push_back(each.values.narrow(0, first, each.ends[at] - first));
  }
  return result;
}

void add_items(Batch& batch, const ConversationSet& set, std::span<const ConversationSet::Sample> samples,
               bool pin_memory) {
  for (size_t kind = 0; kind < set.items().size(); ++kind) {
    const ConversationSet::Items& items = set.items()[kind];
    std::vector<at::Tensor> parts;
    for (const auto& each : samples) {
      if (each.items[kind].size(0) > 0) parts.push_back(each.items[kind]);
    }
    if (parts.empty()) continue;
    batch.set(items.name, cat_parts(parts, 0, pin_memory && !items.is_host_data), Axis::kItem, items.is_input);
  }
}

ConversationDataset::ConversationDataset(std::shared_ptr<const ConversationSet> set, const SplitOptions& options)
    : set_(std::move(set)),
      first_(options.first),
      last_(options.last),
      packs_(options.packs),
      last_tokens_(options.last_tokens) {
  const int64_t count = options.last - options.first;
  TORCH_CHECK(count > 0, "the ", options.split_name, " split of \"", set_->prefix(), "\" has none of its ",
              set_->size(), " conversations; give it a larger share by --split");
  for (int64_t i = options.first; i < options.last; ++i) {
    const int64_t tokens = set_->tokens_of(i);
    const int64_t most = options.seq_length + (last_tokens_ ? 0 : 1);
    TORCH_CHECK(tokens > 1 && tokens <= most, "conversation ", i, " of \"", set_->prefix(), "\" has ", tokens,
                " tokens, pictures included; it must have from 2 to --seq-length ", last_tokens_ ? "" : "+ 1 ", "= ",
                most, ": raise --seq-length, or write the set with a smaller --max-length");
  }
  NumpyRandomState random(options.seed);
  std::vector<int64_t> groups(static_cast<size_t>(count / options.group));
  do {
    std::iota(groups.begin(), groups.end(), int64_t{0});
    if (options.shuffles) random.shuffle(std::span<int64_t>(groups));
    std::vector<int64_t> firsts;
    for (const int64_t group : groups) firsts.push_back(options.first + group * options.group);
    add_epoch(firsts, options);
  } while (size() < options.num_samples.value_or(0));
  if (options.num_samples) sample_ends_.resize(static_cast<size_t>(*options.num_samples));
}

void ConversationDataset::add_epoch(const std::vector<int64_t>& firsts, const SplitOptions& options) {
  if (!packs_) {
    for (const int64_t first : firsts) {
      for (int64_t i = 0; i < options.group; ++i) {
        order_.push_back(first + i);
        sample_ends_.push_back(std::ssize(order_));
      }
    }
    return;
  }
  std::vector<int64_t> lengths;
  for (const int64_t first : firsts) {
    int64_t length = 0;
    for (int64_t i = 0; i < options.group; ++i) length += inputs_of(set_->tokens_of(first + i));
    TORCH_CHECK(length <= options.seq_length, "conversations ", first, " to ", first + options.group - 1, " of \"",
                set_->prefix(), "\" belong together and have ", length,
                " tokens, which --neat-packing puts in a row: ", "raise --seq-length, or leave out --neat-packing");
    lengths.push_back(length);
  }
  for (const auto& sample : pack_sequences(lengths, options.seq_length)) {
    for (const int64_t place : sample) {
      for (int64_t i = 0; i < options.group; ++i) order_.push_back(firsts[static_cast<size_t>(place)] + i);
    }
    sample_ends_.push_back(std::ssize(order_));
  }
}

Batch ConversationDataset::collate(const std::vector<int64_t>& indices, const BatchOptions& options) const {
  std::vector<ConversationSet::Sample> all;
  std::vector<size_t> row_ends;  // in `all`
  int64_t length = 0;
  for (const int64_t index : indices) {
    int64_t of_row = 0;
    for (const auto& each : conversations(index)) {
      check_tokens(std::vector<int64_t>(each.tokens.begin(), each.tokens.end()), index, options);
      of_row += inputs_of(std::ssize(each.tokens));
      all.push_back(each);
    }
    row_ends.push_back(all.size());
    length = std::max(length, of_row);
  }
  length = (length + options.length_multiple - 1) / options.length_multiple * options.length_multiple;
  const auto zeros = [&](at::ScalarType type) {
    return at::zeros({std::ssize(indices), length}, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  Batch batch;
  batch.set(kTokens, zeros(at::kLong));
  if (packs_) batch.set(kPositionIds, zeros(at::kLong));
  batch.set(kLabels, zeros(at::kLong));
  batch.set(kLossMask, zeros(at::kFloat), Axis::kToken, /*is_input=*/false);
  batch.set(kTokenMask, zeros(at::kBool));
  for (size_t i = 0; i < set_->column_names().size(); ++i) {
    const at::Tensor& column = set_->column(i);
    const auto type = column.is_floating_point() ? at::kFloat : at::kLong;
    const auto sizes = column.dim() == 2 ? std::vector{column.size(1), std::ssize(indices), length}
                                         : std::vector{std::ssize(indices), length};
    batch.set(set_->column_names()[i], at::zeros(sizes, at::TensorOptions(type).pinned_memory(options.pin_memory)),
              Axis::kToken,
              /*is_input=*/false);
  }
  std::vector<int64_t> documents;
  auto conversation = all.cbegin();
  for (size_t row = 0; row < row_ends.size(); ++row) {
    int64_t column = 0;
    for (const auto end = all.cbegin() + static_cast<int64_t>(row_ends[row]); conversation != end; ++conversation) {
      write_conversation(*conversation, set_->column_names(), batch, static_cast<int64_t>(row), column, last_tokens_);
      documents.push_back(inputs_of(std::ssize(conversation->tokens)));
      column += documents.back();
    }
    if (column < length) documents.push_back(length - column);
  }
  if (packs_) batch.document_lengths = at::tensor(documents, at::device(at::kCPU).dtype(at::kLong));
  add_items(batch, *set_, all, options.pin_memory);
  return batch;
}

std::vector<ConversationSet::Sample> ConversationDataset::conversations(int64_t index) const {
  std::vector<ConversationSet::Sample> all;
  for (const int64_t number : numbers_of(index)) all.push_back(set_->sample(number));
  return all;
}

/// Numbers of sample `index`'s conversations in the set.
std::span<const int64_t> ConversationDataset::numbers_of(int64_t index) const {
  const int64_t begin = index == 0 ? 0 : sample_ends_.at(static_cast<size_t>(index) - 1);
  const int64_t end = sample_ends_.at(static_cast<size_t>(index));
  return std::span(order_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

std::string ConversationDataset::parts_of(int64_t index) const {
  return numbered_parts("conversation", numbers_of(index));
}

bool ConversationDataset::has_labels() const {
  for (int64_t i = first_; i < last_; ++i) {
    if (set_->has_labels(i)) return true;
  }
  return false;
}

void ConversationDataset::add_facts(int64_t samples, DatasetFacts& facts) const {
  facts.units["conversation"] += last_ - first_;
  facts.has_fixed_length = false;
  for (int64_t i = first_; i < last_; ++i) facts.tokens += set_->tokens_of(i);
  const int64_t taken = samples == 0 ? 0 : sample_ends_.at(static_cast<size_t>(samples) - 1);
  facts.add_epochs(static_cast<double>(taken) / static_cast<double>(last_ - first_));
}

}  // namespace megashard
