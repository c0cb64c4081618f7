#include "models/vision/picture_encoder.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "models/layers/pass.h"
#include "models/vision/mrope_positions.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

/// Takes the grids of one kind to the host, and checks that its pixels are there.
at::Tensor take_grids(const VisionConfig& config, Batch& input, const std::string& kind,
                      const std::string& pixels_name) {
  const std::string name = kind + "_grid_thw";
  auto grids = input.find(name);
  const auto pixels = input.find(pixels_name);
  if (!grids.defined() && !pixels.defined()) return grids;
  TORCH_CHECK(grids.defined() && pixels.defined(), "the input has ", grids.defined() ? name : pixels_name, " without ",
              grids.defined() ? pixels_name : name, ": give both, or none");
  grids = grids.cpu();
  check_grids(config, grids, name);
  const int64_t patches = grids.prod(1).sum().item<int64_t>();
  TORCH_CHECK(pixels.dim() == 2 && pixels.size(0) == patches && pixels.size(1) == config.pixels_of_patch(), pixels_name,
              " ", pixels.sizes(), " must be [", patches, ", ", config.pixels_of_patch(), "]: the patches that ", name,
              " describes, and their channels, frames and pixels as this model's processor lays them out: prepare the "
              "pictures by it");
  input.take(name);
  return grids.size(0) == 0 ? at::Tensor() : grids;
}

at::Tensor joined(const at::Tensor& images, const at::Tensor& videos) {
  if (!images.defined() || !videos.defined()) return images.defined() ? images : videos;
  return at::cat({images, videos.to(images.scalar_type())});
}

/// Leaves in the input and the grids what reaches into this rank's rows. A picture on the border of
/// two ranks is seen by both; each gives gradients to the features of its own rows.
void keep_own_pictures(PicturePlan& plan, Batch& input, PictureGrids& grids, int64_t merge) {
  const auto features = joined(grids.images, grids.videos).prod(1).div(merge * merge, "floor");
  auto own = items_in_rows(plan.token_indices, features, input.sequence);
  int64_t first = 0;
  const auto keep = [&](at::Tensor& of_kind, const char* pixels_name) {
    if (!of_kind.defined()) return;
    const int64_t pictures = of_kind.size(0);
    const auto patches = of_kind.prod(1);
    input.set(pixels_name, rows_of_items(input.take(pixels_name), patches, own.items, first), Axis::kItem);
    of_kind = rows_of_items(of_kind, at::ones_like(patches), own.items, first);
    first += pictures;
  };
  keep(grids.images, "pixel_values");
  keep(grids.videos, "pixel_values_videos");
  plan.token_indices = own.token_indices;
  plan.own_features = own.features;
}

/// For each token of a row the end of its run of image tokens in its document, or of itself.
at::Tensor ends_of_images(const at::Tensor& tokens, int64_t image, const at::Tensor& document_lengths) {
  const auto dense = tokens.contiguous();
  const auto ends = at::empty_like(dense);
  const int64_t rows = dense.size(0), length = dense.size(1);
  const auto documents = Documents::of(document_lengths, rows, length, /*in_ring=*/false, at::kCPU);
  const auto lengths = documents ? documents->lengths : std::vector<int64_t>(static_cast<size_t>(rows), length);
  const auto* token = dense.const_data_ptr<int64_t>();
  auto* end = ends.mutable_data_ptr<int64_t>();
  int64_t begin = 0;
  for (const int64_t document : lengths) {
    for (int64_t i = begin + document - 1; i >= begin; --i) {
      const bool goes_on = i + 1 < begin + document && token[i] == image && token[i + 1] == image;
      end[i] = goes_on ? end[i + 1] : i % length + 1;
    }
    begin += document;
  }
  return ends;
}

}  // namespace

PictureEncoder::PictureEncoder(VisionLanguageConfig config, std::shared_ptr<PictureTower> tower)
    : config_(std::move(config)), tower_(std::move(tower)) {}

InjectedEmbeddings PictureEncoder::encode(const Batch& input) {
  const auto* plan = dynamic_cast<const PicturePlan*>(input.plan.get());
  TORCH_CHECK(plan != nullptr, config_.model_name,
              " got an input that was not prepared: call the model, not its parts");
  if (plan->vision.patches == 0) return {};
  const auto device = input.tokens().device();
  auto patches = joined(input.find("pixel_values"), input.find("pixel_values_videos"));
  if (plan->dummy_image) {
    patches = at::zeros({plan->vision.patches, config_.vision.pixels_of_patch()}, at::TensorOptions().device(device));
  }
  auto seen = tower_->features(on_device(patches, device), plan->vision);
  const auto token_indices = on_device(plan->token_indices, device);
  const auto own = plan->own_features.defined() ? on_device(plan->own_features, device) : at::Tensor();
  const auto placed = [&](const at::Tensor& x) {
    return own.defined() ? x.index_select(0, own) : x.narrow(0, 0, token_indices.size(0));
  };
  InjectedEmbeddings visual{.token_indices = token_indices, .features = placed(seen.features), .deepstack = {}};
  if (plan->key_ends.defined()) visual.key_ends = on_device(plan->key_ends, device);
  for (const auto& each : seen.deepstack) visual.deepstack.push_back(placed(each));
  return visual;
}

void PictureEncoder::prepare(Batch& input) const {
  const auto plan = std::make_shared<PicturePlan>();
  const auto& vision = config_.vision;
  PictureGrids grids{.images = take_grids(vision, input, "image", "pixel_values"),
                     .videos = take_grids(vision, input, "video", "pixel_values_videos"),
                     .seconds_per_frame = input.find("second_per_grid_ts").defined()
                                              ? input.find("second_per_grid_ts").cpu()
                                              : at::Tensor()};
  input.take("second_per_grid_ts");
  if (grids.images.defined() || grids.videos.defined()) {
    const auto& seconds = grids.seconds_per_frame;
    TORCH_CHECK(
        !seconds.defined() || (grids.videos.defined() && seconds.dim() == 1 && seconds.size(0) == grids.videos.size(0)),
        "second_per_grid_ts must hold one number for each video of video_grid_thw");
    const auto& shard = input.sequence;
    TORCH_CHECK(shard.is_whole() || input.tokens().size(1) == shard.length,
                "pictures are placed in whole sequences, of ", shard.length, " tokens here, and got ",
                input.tokens().size(1), ": call prepare() before taking this rank's rows");
    const auto tokens = input.tokens().cpu();
    const auto placed = place_pictures(config_, tokens, grids, input.document_lengths);
    plan->token_indices = placed.token_indices;
    if (config_.sees_whole) plan->key_ends = ends_of_images(tokens, config_.image_token_id, input.document_lengths);
    const at::Tensor positions = input.position_ids();
    const bool has_those_of_text = input.document_lengths.defined() && positions.dim() == 2;
    if (config_.mrope && (!positions.defined() || has_those_of_text)) {
      const bool may_be_cast = !placed.position_ids.is_floating_point();  // mixed precision would round them
      input.set(kPositionIds, placed.position_ids, Axis::kToken, /*is_input=*/may_be_cast);
    }
    if (!shard.is_whole()) keep_own_pictures(*plan, input, grids, vision.merge_size);
  }
  if (grids.images.defined() || grids.videos.defined()) {
    plan->vision = plan_vision(vision, joined(grids.images, grids.videos));
  } else if (any_is_sharded(tower_->modules())) {
    plan->dummy_image = true;
    plan->vision = plan_vision(vision, at::tensor({int64_t{1}, vision.merge_size, vision.merge_size}).view({1, 3}));
    plan->token_indices = at::zeros({0}, at::kLong);
  }
  input.plan = plan;
}

namespace {

class PictureEncoderSpec final : public EncoderSpec {
 public:
  PictureEncoderSpec(VisionLanguageConfig config, PictureTowerSpec tower)
      : config_(std::move(config)), tower_(std::move(tower)) {}

  std::shared_ptr<Encoder> build() const override { return std::make_shared<PictureEncoder>(config_, tower_.build()); }
  std::string owner_class() const override { return config_.model_name; }
  std::vector<EncoderTower> towers() const override {
    return {{tower_.name, "image_encoder", tower_.layers, tower_.casts_inputs}};
  }
  std::vector<int64_t> qkv_split_shapes(const std::string& name, const std::vector<int64_t>& sizes) const override {
    const bool is_joined = !tower_.qkv.empty() && name.ends_with("." + tower_.qkv + ".weight");
    return is_joined ? std::vector<int64_t>(3, sizes[0] / 3) : std::vector<int64_t>();
  }
  std::vector<WeightGroup> weight_forms(const std::string& path) const override {
    return tower_.forms ? tower_.forms(path + tower_.name + ".") : std::vector<WeightGroup>();
  }

 private:
  VisionLanguageConfig config_;
  PictureTowerSpec tower_;
};

}  // namespace

EncoderSpecPtr picture_encoder(VisionLanguageConfig config, PictureTowerSpec tower) {
  return std::make_shared<PictureEncoderSpec>(std::move(config), std::move(tower));
}

}  // namespace megashard
