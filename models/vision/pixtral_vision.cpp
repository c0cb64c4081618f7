#include "models/vision/pixtral_vision.h"

#include <c10/core/InferenceMode.h>

#include <array>
#include <utility>

#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

TowerLayerSpec pixtral_layer(const VisionConfig& config, NormSpec norm) {
  return {.class_name = config.names.block,
          .attention_class = config.names.attention,
          .norms = {"attention_norm", "ffn_norm"},
          .parts = {"attention", "feed_forward"},
          .out_proj = "o_proj",
          .norm = std::move(norm),
          .num_heads = config.num_heads,
          .mlp = MlpSpec{.class_name = config.names.mlp,
                         .hidden_size = config.hidden_size,
                         .intermediate_size = config.intermediate_size,
                         .activation = config.activation}};
}

/// Modules patch_conv, ln_pre, transformer. Channel pairs of a head turn by rows and columns, whose frequencies
/// alternate.
class PixtralVisionModel : public torch::nn::Module {
 public:
  explicit PixtralVisionModel(const VisionConfig& config)
      : class_name_(config.names.tower), theta_(config.rotary_theta), head_(config.hidden_size / config.num_heads) {
    const NormSpec norm{.class_name = config.names.norm, .width = config.hidden_size, .eps = config.norm_eps};
    const std::array sizes{config.hidden_size, config.in_channels, config.patch_size, config.patch_size};
    patch_conv_ = register_module("patch_conv", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/false));
    ln_pre_ = register_module("ln_pre", std::make_shared<Hooked<Norm>>(norm));
    transformer_ = register_module("transformer", std::make_shared<Hooked<TowerStack>>(
                                                      "PixtralTransformer", pixtral_layer(config, norm), config.depth));
  }

  /// patches [P, pixels] -> [P, hidden] in the plan's order
  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {
    const auto hidden = in_tower_order(ln_pre_->forward(patch_conv_->forward(patches)), plan);
    return transformer_->forward(hidden, {rotation(plan, hidden), on_device(plan.frames, hidden.device())});
  }
  std::string class_name() const { return class_name_; }

 private:
  RotaryTables rotation(const VisionPlan& plan, const at::Tensor& hidden) {
    if (!frequencies_.defined() || frequencies_.device() != hidden.device()) {
      const c10::InferenceMode no_inference(false);  // training may use them later
      frequencies_ =
          on_device(inverse_frequencies({.theta = theta_}, head_).view({-1, 2}).t().contiguous(), hidden.device());
    }
    const auto tables = vision_tables(frequencies_, on_device(plan.positions, hidden.device()));
    return {tables.cos.to(hidden.scalar_type()), tables.sin.to(hidden.scalar_type())};
  }

  std::string class_name_;
  double theta_;
  int64_t head_;  // channels
  std::shared_ptr<Hooked<PatchConvolution>> patch_conv_;
  std::shared_ptr<Hooked<Norm>> ln_pre_;
  std::shared_ptr<Hooked<TowerStack>> transformer_;
  at::Tensor frequencies_;  // [2, head / 4] by axis, on the device of the last forward
};

/// Merges neighbouring patches into one; a channel of theirs follows the other.
class PatchMergingLayer : public torch::nn::Module {
 public:
  PatchMergingLayer(int64_t width, int64_t patches) : patches_(patches) {
    merging_layer_ = register_module(
        "merging_layer", std::make_shared<Hooked<Linear>>(Linear::Options{.in = width * patches, .out = width}));
  }

  at::Tensor forward(const at::Tensor& hidden) {  // [P, width] -> [P / patches, width]
    return merging_layer_->forward(hidden.unflatten(0, {-1, patches_}).transpose(1, 2).flatten(1));
  }
  std::string class_name() const { return "Mistral3PatchMerger"; }

 private:
  int64_t patches_;
  std::shared_ptr<Hooked<Linear>> merging_layer_;
};

class Projector : public torch::nn::Module {
 public:
  Projector(const VisionConfig& config, const ProjectorSpec& spec)
      : class_name_(spec.class_name), activation_(spec.activation) {
    norm_ = register_module("norm", std::make_shared<Hooked<Norm>>(spec.norm));
    patch_merger_ = register_module("patch_merger", std::make_shared<Hooked<PatchMergingLayer>>(
                                                        config.hidden_size, config.merge_size * config.merge_size));
    const auto linear = [&](const char* name, int64_t in) {
      return register_module(name, std::make_shared<Hooked<Linear>>(
                                       Linear::Options{.in = in, .out = config.out_hidden_size, .bias = spec.bias}));
    };
    linear_1_ = linear("linear_1", config.hidden_size);
    linear_2_ = linear("linear_2", config.out_hidden_size);
  }

  at::Tensor forward(const at::Tensor& hidden) {
    const auto merged = patch_merger_->forward(norm_->forward(hidden));
    return linear_2_->forward(activate(linear_1_->forward(merged), activation_));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  Activation activation_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<PatchMergingLayer>> patch_merger_;
  std::shared_ptr<Hooked<Linear>> linear_1_, linear_2_;
};

class PixtralTower final : public PictureTower {
 public:
  PixtralTower(const VisionConfig& config, const ProjectorSpec& projector)
      : tower_(std::make_shared<Hooked<PixtralVisionModel>>(config)),
        projector_(std::make_shared<Hooked<Projector>>(config, projector)) {}

  EncoderModules modules() override { return {{"vision_tower", tower_}, {"multi_modal_projector", projector_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = in_given_order(projector_->forward(tower_->forward(patches, plan)), plan), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<PixtralVisionModel>> tower_;
  std::shared_ptr<Hooked<Projector>> projector_;
};

}  // namespace

EncoderSpecPtr pixtral_vision(VisionLanguageConfig config, ProjectorSpec projector) {
  auto build = [vision = config.vision, projector = std::move(projector)] {
    return std::make_shared<PixtralTower>(vision, projector);
  };
  return picture_encoder(std::move(config), {.layers = "transformer.layers.{*}", .build = std::move(build)});
}

}  // namespace megashard
