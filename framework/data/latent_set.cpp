#include "framework/data/latent_set.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/values/torch_archive.h"
#include "framework/mistakes.h"

namespace megashard {
namespace {

constexpr const char* kVideo = "video";
constexpr const char* kPromptIds = "prompt_ids";
constexpr const char* kPromptMask = "prompt_mask";
constexpr const char* kPooledPrompt = "pooled_prompt";

/// A dict that torch.save has written, whose tensors are read when asked for.
class FeatureFile {
 public:
  explicit FeatureFile(const std::string& path)
      : file_(path), archive_(file_, {.offset = 0, .length = file_.size()}), root_(read_root(archive_)) {
    TORCH_CHECK(root_.get_if<Dict>() != nullptr, path, " has a ", root_.kind(), " and no dict of features; write it ",
                "with launch/preprocess/preprocess_latents.py");
  }

  /// That of the first key there is.
  at::Tensor either(const char* key, const char* other, size_t dims) const {
    const auto found = tensor(key, dims);
    return found.defined() ? found : tensor(other, dims);
  }

  /// Sizes without the first dimension of size 1 of a tensor with more than `dims` dimensions; empty without the key.
  std::vector<int64_t> sizes(const char* key, size_t dims) const {
    const auto stored = find(key, dims);
    return stored ? stored->sizes : std::vector<int64_t>();
  }

  /// Undefined without the key; `place`: in a list.
  at::Tensor tensor(const char* key, size_t dims, size_t place = 0) const {
    const auto stored = find(key, dims, place);
    return stored ? read_rows(file_, *stored, 0, dims == 0 ? 0 : stored->sizes[0]) : at::Tensor();
  }

  at::Tensor need(const char* key, size_t dims) const {
    at::Tensor found = tensor(key, dims);
    TORCH_CHECK(found.defined(), file_.path(), " has no \"", key, "\"; write the features again");
    return found;
  }

  int64_t number(const char* key) const {
    const Value* value = root_.as_dict().find(key);
    return value == nullptr ? 0 : value->as_int();
  }

 private:
  /// A tensor is a list of one.
  std::optional<StoredTensor> find(const char* key, size_t dims, size_t place = 0) const {
    const Value* value = root_.as_dict().find(key);
    if (value == nullptr || value->is_none()) return std::nullopt;
    if (const auto* list = value->get_if<List>()) {
      const size_t count = list->items.size();
      TORCH_CHECK(count == 1 || count == 2, file_.path(), ": \"", key, "\" is a list of ", count,
                  " tensors, and models here have one or two text encoders");
      if (place >= count) return std::nullopt;
      value = &list->items[place];
    } else if (place > 0) {
      return std::nullopt;
    }
    auto stored = stored_tensor(archive_, *value);
    TORCH_CHECK(stored.has_value(), file_.path(), ": \"", key, "\" is a ", value->kind(), " and no tensor");
    while (stored->sizes.size() > dims && stored->sizes.front() == 1) {
      stored->sizes.erase(stored->sizes.begin());
      stored->strides.erase(stored->strides.begin());
    }
    TORCH_CHECK(stored->sizes.size() == dims, file_.path(), ": \"", key, "\" has the sizes ",
                c10::IntArrayRef(stored->sizes), "; it must have ", dims, " dimensions");
    return stored;
  }

  InputFile file_;
  TorchArchive archive_;
  Value root_;
};

at::Tensor as(const at::Tensor& tensor, at::ScalarType type) { return tensor.defined() ? tensor.to(type) : tensor; }

/// Reads the text's features and masks.
void read_text(const FeatureFile& file, LatentSample& sample) {
  sample.text_features = file.need(kPromptIds, 2);
  sample.text_mask = as(file.tensor(kPromptMask, 1), at::kBool);
  sample.pooled_text = file.tensor(kPooledPrompt, 1);
  sample.second_text = file.tensor(kPromptIds, 2, 1);
  sample.second_mask = as(file.tensor(kPromptMask, 1, 1), at::kBool);
}

std::array<int64_t, 4> shape_of(const std::vector<int64_t>& sizes, const std::string& where) {
  std::array<int64_t, 4> shape{};
  TORCH_CHECK(sizes.size() == shape.size(), where, ": the latents' shape must have 4 numbers, [C, F, H, W]; got ",
              c10::IntArrayRef(sizes));
  for (size_t i = 0; i < shape.size(); ++i) {
    TORCH_CHECK(sizes[i] > 0, where, ": the latents' shape has a ", sizes[i], "; write the features again");
    shape[i] = sizes[i];
  }
  return shape;
}

}  // namespace

std::array<int64_t, 3> patch_grid(const std::array<int64_t, 4>& shape, const std::array<int64_t, 3>& patch) {
  return {shape[1] / patch[0], shape[2] / patch[1], shape[3] / patch[2]};
}

LatentSet::LatentSet(const std::string& folder) : folder_(folder) {
  const std::string path = folder + kLatentsFile;
  std::ifstream file(path);
  require(file.good(), path + " cannot be read; write it with launch/preprocess/preprocess_latents.py.");
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") != std::string::npos) add_line(line, number);
  }
  require(!files_.empty(), path + " has no samples; write it with launch/preprocess/preprocess_latents.py.");
  const std::string empty = folder + "/empty_prompt.pt";
  if (!std::filesystem::exists(empty)) return;
  read_text(FeatureFile(empty), empty_prompt_);
}

void LatentSet::add_line(const std::string& line, int64_t number) {
  const std::string where = folder_ + kLatentsFile + ", line " + std::to_string(number);
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  require(object.is_object() && object.contains("file") && object["file"].is_string(),
          where + " is no object with a \"file\"; a line is {\"file\": \"features/0.pt\"}.");
  const std::filesystem::path relative = object["file"].get<std::string>();
  const auto inside = relative.lexically_normal();
  require(relative.is_relative() && *inside.begin() != "..",
          where + ": \"" + relative.string() + "\" is outside of the folder; give a path inside it.");
  files_.push_back((std::filesystem::path(folder_) / inside).string());
  std::vector<int64_t> sizes;
  if (object.contains("shape")) {
    const auto& shape = object["shape"];
    const auto is_whole = [](const auto& each) { return each.is_number_integer(); };
    require(shape.is_array() && std::ranges::all_of(shape, is_whole), where + ": \"shape\" must be [C, F, H, W].");
    for (const auto& size : shape) sizes.push_back(size.template get<int64_t>());
  } else {
    sizes = FeatureFile(files_.back()).sizes(kVideo, 4);
  }
  shapes_.push_back(shape_of(sizes, where));
}

int64_t LatentSet::most_patches(const std::array<int64_t, 3>& patch) const {
  int64_t most = 0;
  for (const auto& shape : shapes_) most = std::max(most, c10::multiply_integers(patch_grid(shape, patch)));
  return most;
}

LatentSample LatentSet::read(int64_t sample) const {
  const std::string& path = files_[static_cast<size_t>(sample)];
  const FeatureFile file(path);
  LatentSample read;
  read_text(file, read);
  const auto in_fp32 = [&file](const char* key, size_t dims) { return as(file.tensor(key, dims), at::kFloat); };
  read.latents = file.need(kVideo, 4).to(at::kFloat);
  read.conditions = as(file.either("i2v_vae_feature", "cond_latents", 4), at::kFloat);
  read.image_features = file.either("i2v_clip_feature", "vision_states", 2);
  read.controls = in_fp32("vace_context", 4);
  read.sounds = in_fp32("sound", 2);
  read.frame_rate = in_fp32("frame_rate", 0);
  read.noise = in_fp32("noise", 4);
  read.sound_noise = in_fp32("sound_noise", 2);
  read.timestep = in_fp32("timestep", 0);
  read.clean_frames = file.number("clean_frames");
  const auto& shape = shapes_[static_cast<size_t>(sample)];
  TORCH_CHECK(read.latents.sizes() == c10::IntArrayRef(shape), path, " has latents of the sizes ", read.latents.sizes(),
              ", and data.jsonl says ", c10::IntArrayRef(shape), "; write the features again");
  TORCH_CHECK(read.clean_frames >= 0 && read.clean_frames <= shape[1], path, ": \"clean_frames\" is ",
              read.clean_frames, ", and the video has ", shape[1], " frames of latents; write the features again");
  for (const auto& [key, each] : {std::pair{"i2v_vae_feature", read.conditions},
                                  std::pair{"vace_context", read.controls}, std::pair{"noise", read.noise}}) {
    TORCH_CHECK(!each.defined() || each.sizes().slice(1) == read.latents.sizes().slice(1), path, ": \"", key,
                "\" has the sizes ", each.sizes(), "; frames, rows and columns must be those of \"video\", ",
                read.latents.sizes());
  }
  return read;
}

}  // namespace megashard
