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

  /// Sizes without the first dimension of size 1 of a tensor with more than `dims` dimensions; empty without the key.
  std::vector<int64_t> sizes(const char* key, size_t dims) const {
    const auto stored = find(key, dims);
    return stored ? stored->sizes : std::vector<int64_t>();
  }

  /// Undefined without the key.
  at::Tensor tensor(const char* key, size_t dims) const {
    const auto stored = find(key, dims);
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
  std::optional<StoredTensor> find(const char* key, size_t dims) const {
    const Value* value = root_.as_dict().find(key);
    if (value == nullptr || value->is_none()) return std::nullopt;
    if (const auto* list = value->get_if<List>()) {
      TORCH_CHECK(list->items.size() == 1, file_.path(), ": \"", key, "\" is a list of ", list->items.size(),
                  " tensors, and a model here has one text encoder");
      value = &list->items.front();
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
  const FeatureFile prompt(empty);
  empty_prompt_.text_features = prompt.need(kPromptIds, 2);
  empty_prompt_.text_mask = as(prompt.tensor(kPromptMask, 1), at::kBool);
  empty_prompt_.pooled_text = prompt.tensor(kPooledPrompt, 1);
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
  LatentSample read{.latents = as(file.need(kVideo, 4), at::kFloat),
                    .text_features = file.need(kPromptIds, 2),
                    .text_mask = as(file.tensor(kPromptMask, 1), at::kBool),
                    .pooled_text = file.tensor(kPooledPrompt, 1),
                    .conditions = as(file.tensor("i2v_vae_feature", 4), at::kFloat),
                    .image_features = file.tensor("i2v_clip_feature", 2),
                    .controls = as(file.tensor("vace_context", 4), at::kFloat),
                    .noise = as(file.tensor("noise", 4), at::kFloat),
                    .timestep = as(file.tensor("timestep", 0), at::kFloat),
                    .clean_frames = file.number("clean_frames")};
  const auto& shape = shapes_[static_cast<size_t>(sample)];
  TORCH_CHECK(read.latents.sizes() == c10::IntArrayRef(shape), path, " has latents of the sizes ", read.latents.sizes(),
              ", and data.jsonl says ", c10::IntArrayRef(shape), "; write the features again");
  for (const auto& [key, each] : {std::pair{"i2v_vae_feature", read.conditions},
                                  std::pair{"vace_context", read.controls}, std::pair{"noise", read.noise}}) {
    TORCH_CHECK(!each.defined() || each.sizes().slice(1) == read.latents.sizes().slice(1), path, ": \"", key,
                "\" has the sizes ", each.sizes(), "; frames, rows and columns must be those of \"video\", ",
                read.latents.sizes());
  }
  return read;
}

}  // namespace megashard
