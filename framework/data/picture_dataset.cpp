#include "framework/data/picture_dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "framework/data/numpy_random.h"

namespace megashard {
namespace {

std::string file_of(const std::string& prefix) { return prefix + ".vision.safetensors"; }

at::Tensor need_tensor(const SafetensorsFile& file, const char* name, at::ScalarType dtype,
                       int64_t dims) {
  TORCH_CHECK(file.contains(name), file.path(), " has no ", name,
              ": it is no set of conversations; write it by preprocess_data.py --input-format conversations");
  const auto& info = file.info(name);
  TORCH_CHECK(info.dtype == dtype && static_cast<int64_t>(info.sizes.size()) == dims, file.path(), ": ", name, " must be ",
              dtype, " with ", dims, " dimensions, got ", info.dtype, " ", c10::IntArrayRef(info.sizes),
              "; write it by preprocess_data.py --input-format conversations");
  return file.tensor(name);
}

}  // namespace

bool PictureSet::exists(const std::string& prefix) {
  return std::filesystem::exists(file_of(prefix));
}

PictureSet::PictureSet(const std::string& prefix) : prefix_(prefix), file_(file_of(prefix)) {
  tokens_ = need_tensor(file_, "tokens", at::kInt, 1);
  loss_mask_ = need_tensor(file_, "loss_mask", at::kByte, 1);
  grids_ = need_tensor(file_, "image_grid_thw", at::kLong, 2);
  pixels_ = need_tensor(file_, "pixel_values", at::kFloat, 2);
  TORCH_CHECK(loss_mask_.size(0) == tokens_.size(0) && grids_.size(1) == 3, file_.path(),
              ": loss_mask must have the size of tokens, and image_grid_thw three columns");
  sample_ends_ = read_ends("sample_ends", tokens_.size(0));
  image_ends_ = read_ends("image_ends", grids_.size(0));
  TORCH_CHECK(sample_ends_.size() == image_ends_.size() && !sample_ends_.empty(), file_.path(),
              ": sample_ends and image_ends must be of one size, and not empty");
  const auto* grid = grids_.const_data_ptr<int64_t>();
  int64_t patches = 0;
  for (int64_t image = 0; image < grids_.size(0); ++image, grid += 3) {
    constexpr int64_t kMost = int64_t{1} << 20;  // no product of three overflows
    for (int i = 0; i < 3; ++i) {
      TORCH_CHECK(grid[i] > 0 && grid[i] < kMost, file_.path(), ": image ", image, " has a grid with ", grid[i],
                  "; the file is damaged, write it again");
    }
    patches += grid[0] * grid[1] * grid[2];
    TORCH_CHECK(patches <= pixels_.size(0), file_.path(), ": image_grid_thw describes more patches than the ",
                pixels_.size(0), " of pixel_values; the file is damaged, write it again");
    patch_ends_.push_back(patches);
  }
  TORCH_CHECK(patches == pixels_.size(0), file_.path(), ": image_grid_thw describes ", patches, " patches, pixel_values has ",
              pixels_.size(0), "; the file is damaged, write it again");
}

std::vector<int64_t> PictureSet::read_ends(const char* name, int64_t last) const {
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

int64_t PictureSet::tokens_of(int64_t sample) const {
  const auto at = static_cast<size_t>(sample);
  return sample_ends_[at] - (at == 0 ? 0 : sample_ends_[at - 1]);
}

PictureSet::Sample PictureSet::sample(int64_t sample) const {
  const auto at = static_cast<size_t>(sample);
  const int64_t count = tokens_of(sample), first = sample_ends_[at] - count;
  const int64_t image = at == 0 ? 0 : image_ends_[at - 1], images = image_ends_[at] - image;
  const auto patch_end = [&](int64_t number) {
    return number == 0 ? 0 : patch_ends_[static_cast<size_t>(number) - 1];
  };
  const int64_t patch = patch_end(image), patches = patch_end(image + images) - patch;
  return {.tokens = {tokens_.const_data_ptr<int32_t>() + first, static_cast<size_t>(count)},
          .loss_mask = {loss_mask_.const_data_ptr<uint8_t>() + first, static_cast<size_t>(count)},
          .image_grids = grids_.narrow(0, image, images),
          .pixel_values = pixels_.narrow(0, patch, patches)};
}

PictureDataset::PictureDataset(std::shared_ptr<const PictureSet> set,
                               const PictureDatasetOptions& options)
    : set_(std::move(set)) {
  const int64_t count = options.last_sample - options.first_sample;
  TORCH_CHECK(count > 0, "the ", options.split_name, " split of \"", set_->prefix(), "\" has none of its ", set_->size(),
              " conversations; give it a larger share by --split");
  for (int64_t i = options.first_sample; i < options.last_sample; ++i) {
    const int64_t tokens = set_->tokens_of(i);
    TORCH_CHECK(tokens > 1 && tokens <= options.seq_length + 1, "conversation ", i, " of \"", set_->prefix(), "\" has ", tokens,
                " tokens, pictures included; it must have from 2 to --seq-length + 1 = ", options.seq_length + 1,
                ": raise --seq-length, or write the set with a smaller --max-length");
  }
  const int64_t wanted = options.num_samples.value_or(count);
  order_.reserve(static_cast<size_t>(wanted));
  NumpyRandomState random(options.seed);
  std::vector<int64_t> epoch(static_cast<size_t>(count));
  while (size() < wanted) {
    std::iota(epoch.begin(), epoch.end(), options.first_sample);
    random.shuffle(std::span<int64_t>(epoch));
    const auto some = std::min(wanted - size(), count);
    order_.insert(order_.end(), epoch.begin(), epoch.begin() + some);
  }
}

void PictureDataset::read(int64_t /*index*/, std::span<int64_t> /*out*/) const {
  TORCH_CHECK(false, "\"", set_->prefix(), "\" holds conversations with pictures, which have no fixed length: "
              "they cannot be blended with token files");
}

PictureSet::Sample PictureDataset::picture_sample(int64_t index) const {
  return set_->sample(order_.at(static_cast<size_t>(index)));
}

}  // namespace megashard
