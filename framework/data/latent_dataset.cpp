#include "framework/data/latent_dataset.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "framework/data/numpy_random.h"
#include "framework/latent_columns.h"

namespace megashard {
namespace {

/// A seed of sample `index` for one purpose (splitmix64, Steele et al. 2014).
uint64_t seed_of(int64_t seed, int64_t index, uint64_t purpose) {
  uint64_t z = static_cast<uint64_t>(seed);
  for (const uint64_t each : {static_cast<uint64_t>(index), purpose}) {
    z += 0x9e3779b97f4a7c15 * (each + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}
constexpr uint64_t kForNoise = 0, kForCaption = 1;

/// Adds runs of one shape, shuffled by `random`; null: in the order of their first samples. Leaves in `waiting` what
/// fills no run.
void add_epoch(std::map<std::array<int64_t, 4>, std::vector<int64_t>>& waiting, int64_t run, NumpyRandomState* random,
               std::vector<int64_t>& order) {
  std::vector<std::vector<int64_t>> runs;
  for (auto& [shape, samples] : waiting) {
    size_t taken = 0;
    for (; taken + static_cast<size_t>(run) <= samples.size(); taken += static_cast<size_t>(run)) {
      const auto begin = samples.begin() + static_cast<int64_t>(taken);
      runs.emplace_back(begin, begin + run);
    }
    samples.erase(samples.begin(), samples.begin() + static_cast<int64_t>(taken));
  }
  if (random == nullptr) {
    std::ranges::sort(runs);
  } else {
    random->shuffle(std::span(runs));
  }
  for (const auto& each : runs) order.insert(order.end(), each.begin(), each.end());
}

/// Stacks a feature of all samples to [B, ...]; undefined if none has it.
at::Tensor stacked(const std::vector<LatentSample>& samples, at::Tensor LatentSample::*member, const char* name,
                   const std::string& folder, bool pin_memory) {
  std::vector<at::Tensor> parts;
  for (const LatentSample& each : samples) {
    if ((each.*member).defined()) parts.push_back((each.*member).unsqueeze(0));
  }
  if (parts.empty()) return {};
  const auto is_alike = [&](const at::Tensor& part) { return part.sizes() == parts.front().sizes(); };
  TORCH_CHECK(parts.size() == samples.size() && std::ranges::all_of(parts, is_alike), folder,
              ": some samples of a batch have other sizes of \"", name,
              "\", or none: write the features of all with one length, or give --micro-batch-size 1");
  return cat_parts(parts, 0, pin_memory);
}

}  // namespace

at::Tensor patches_of_video(const at::Tensor& video, const std::array<int64_t, 3>& patch) {
  const auto sizes = video.sizes();
  const auto [frames, rows, columns] = patch;
  return video.view({sizes[0], sizes[1] / frames, frames, sizes[2] / rows, rows, sizes[3] / columns, columns})
      .permute({0, 2, 4, 6, 1, 3, 5})
      .reshape({sizes[0] * frames * rows * columns, -1});
}

at::Tensor video_of_patches(const at::Tensor& patches, const std::vector<int64_t>& sizes,
                            const std::array<int64_t, 3>& patch) {
  std::array<int64_t, 3> grid{};
  for (size_t i = 0; i < grid.size(); ++i) grid[i] = sizes[i] / patch[i];
  return patches.narrow(1, 0, grid[0] * grid[1] * grid[2])
      .reshape({-1, patch[0], patch[1], patch[2], grid[0], grid[1], grid[2]})
      .permute({0, 4, 1, 5, 2, 6, 3})
      .reshape({-1, sizes[0], sizes[1], sizes[2]});
}

LatentDataset::LatentDataset(std::shared_ptr<const LatentSet> set, const SplitOptions& split,
                             const LatentOptions& options)
    : set_(std::move(set)), options_(options), first_(split.first), last_(split.last), seed_(split.seed) {
  TORCH_CHECK(last_ > first_, "the ", split.split_name, " split of \"", set_->folder(), "\" has none of its ",
              set_->size(), " samples; give it a larger share by --split");
  TORCH_CHECK(options_.caption_dropout == 0 || set_->empty_prompt().text_features.defined(), set_->folder(),
              " has no empty_prompt.pt, the text features that --caption-dropout-rate needs; write them with ",
              "launch/preprocess/preprocess_latents.py");
  for (int64_t i = first_; i < last_; ++i) check_sample(i, split.seq_length);
  NumpyRandomState random(split.seed);
  const int64_t count = last_ - first_, asked = split.num_samples.value_or(count);
  std::vector<int64_t> epoch(static_cast<size_t>(count));
  std::map<std::array<int64_t, 4>, std::vector<int64_t>> waiting;
  while (size() < asked) {
    std::iota(epoch.begin(), epoch.end(), first_);
    if (split.shuffles) random.shuffle(std::span<int64_t>(epoch));
    for (const int64_t sample : epoch) waiting[set_->shape(sample)].push_back(sample);
    add_epoch(waiting, split.num_samples ? options_.run : 1, split.shuffles ? &random : nullptr, order_);
  }
  order_.resize(static_cast<size_t>(asked));
}

int64_t LatentDataset::patches_of(int64_t sample) const {
  return c10::multiply_integers(patch_grid(set_->shape(sample), options_.patches.patch));
}

void LatentDataset::check_sample(int64_t sample, int64_t seq_length) const {
  const auto& shape = set_->shape(sample);
  const auto& patch = options_.patches.patch;
  const auto told = [&] { return c10::str("sample ", sample, " of ", set_->folder(), " "); };
  TORCH_CHECK(shape[0] == options_.patches.channels, told(), "has latents of ", shape[0], " channels, and the model's ",
              "have ", options_.patches.channels, ": write the features with the model's own VAE");
  for (size_t i = 0; i < patch.size(); ++i) {
    TORCH_CHECK(shape[i + 1] % patch[i] == 0, told(), "has latents of the sizes ", c10::IntArrayRef(shape),
                ", which the model's patches, ", c10::IntArrayRef(patch),
                ", do not divide: give a size of pictures that they divide when the features are written");
  }
  TORCH_CHECK(patches_of(sample) <= seq_length, told(), "has ", patches_of(sample), " patches, more than --seq-length ",
              seq_length, "; raise it");
}

std::string LatentDataset::parts_of(int64_t index) const {
  return numbered_parts("sample", std::span(&order_[static_cast<size_t>(index)], 1));
}

void LatentDataset::add_facts(int64_t samples, DatasetFacts& facts) const {
  facts.units["sample"] += last_ - first_;
  facts.entry = "latent";
  facts.has_fixed_length = false;
  for (int64_t i = first_; i < last_; ++i) facts.tokens += patches_of(i);
  facts.add_epochs(static_cast<double>(samples) / static_cast<double>(last_ - first_));
}

LatentSample LatentDataset::read(int64_t index) const {
  LatentSample sample = set_->read(order_[static_cast<size_t>(index)]);
  constexpr double kRange = 18446744073709551616.0;  // 2^64
  if (static_cast<double>(seed_of(seed_, index, kForCaption)) / kRange < options_.caption_dropout) {
    const LatentSample& empty = set_->empty_prompt();
    sample.text_features = empty.text_features;
    sample.text_mask = empty.text_mask;
    sample.pooled_text = empty.pooled_text;
    sample.second_text = empty.second_text;
    sample.second_mask = empty.second_mask;
  }
  return sample;
}

Batch LatentDataset::collate(const std::vector<int64_t>& indices, const BatchOptions& options) const {
  std::vector<LatentSample> samples;
  int64_t longest = 0;
  for (const int64_t index : indices) {
    samples.push_back(read(index));
    longest = std::max(longest, patches_of(order_[static_cast<size_t>(index)]));
  }
  const int64_t rows = std::ssize(indices);
  const int64_t length = (longest + options.length_multiple - 1) / options.length_multiple * options.length_multiple;
  const auto zeros = [&](at::IntArrayRef sizes, at::ScalarType type) {
    return at::zeros(sizes, at::TensorOptions(type).pinned_memory(options.pin_memory));
  };
  Batch batch;
  const auto set_patches = [&](const char* name, at::Tensor LatentSample::*member) {
    if (!(samples.front().*member).defined()) return;
    at::Tensor column;
    for (int64_t row = 0; row < rows; ++row) {
      const at::Tensor& video = samples[static_cast<size_t>(row)].*member;
      TORCH_CHECK(video.defined(), set_->folder(), ": only some samples of a batch have the column \"", name, "\"");
      const at::Tensor patches = patches_of_video(video, options_.patches.patch);
      if (!column.defined()) column = zeros({patches.size(0), rows, length}, at::kFloat);
      column.select(1, row).narrow(1, 0, patches.size(1)).copy_(patches);
    }
    batch.set(name, column);
  };
  set_patches(kLatents, &LatentSample::latents);
  set_patches(kConditions, &LatentSample::conditions);
  set_patches(kControls, &LatentSample::controls);
  set_patches(kNoise, &LatentSample::noise);
  const auto row_column = [&](const char* name, at::Tensor LatentSample::*member) {
    batch.set(name, stacked(samples, member, name, set_->folder(), options.pin_memory), Axis::kRow);
  };
  row_column(kTextFeatures, &LatentSample::text_features);
  row_column(kTextMask, &LatentSample::text_mask);
  row_column(kPooledText, &LatentSample::pooled_text);
  row_column(kSecondText, &LatentSample::second_text);
  row_column(kSecondTextMask, &LatentSample::second_mask);
  row_column(kImageFeatures, &LatentSample::image_features);
  row_column(kSounds, &LatentSample::sounds);
  row_column(kSoundNoise, &LatentSample::sound_noise);
  row_column(kFrameRates, &LatentSample::frame_rate);
  row_column(kTimesteps, &LatentSample::timestep);
  const at::Tensor positions = zeros({3, rows, length}, at::kLong), loss_mask = zeros({rows, length}, at::kFloat);
  const at::Tensor is_clean = zeros({rows, length}, at::kBool), is_patch = zeros({rows, length}, at::kBool);
  const at::Tensor seeds = zeros({rows}, at::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    const auto place = static_cast<size_t>(row);
    const auto grid = patch_grid(set_->shape(order_[static_cast<size_t>(indices[place])]), options_.patches.patch);
    const int64_t count = c10::multiply_integers(grid);
    for (size_t i = 0; i < grid.size(); ++i) {
      std::array<int64_t, 3> along{1, 1, 1};
      along[i] = grid[i];
      const at::Tensor numbers = at::arange(grid[i]).view(along).expand(grid).reshape({count});
      positions[static_cast<int64_t>(i)][row].narrow(0, 0, count).copy_(numbers);
    }
    const int64_t clean = samples[place].clean_frames / options_.patches.patch[0] * grid[1] * grid[2];
    loss_mask[row].narrow(0, clean, count - clean).fill_(1);
    is_clean[row].narrow(0, 0, clean).fill_(true);
    is_patch[row].narrow(0, 0, count).fill_(true);
    seeds[row] = static_cast<int64_t>(seed_of(seed_, indices[place], kForNoise));
  }
  batch.set(kPositionIds, positions);
  batch.set(kLossMask, loss_mask, Axis::kToken, /*is_input=*/false);
  batch.set(kNoiseSeeds, seeds, Axis::kRow, /*is_input=*/false);
  const auto has_clean = [](const LatentSample& each) { return each.clean_frames > 0; };
  if (std::ranges::any_of(samples, has_clean)) batch.set(kCleanPatches, is_clean);
  if (!is_patch.all().item<bool>()) batch.set(kTokenMask, is_patch);
  return batch;
}

}  // namespace megashard
