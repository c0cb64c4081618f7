#include "models/vision/glm_vision.h"

#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <array>
#include <utility>

#include "models/vision/qwen_vision.h"
#include "models/vision/vision_tower.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

NormSpec rms_norm_of(const VisionConfig& config) {
  return {.class_name = config.names.norm, .width = config.hidden_size, .eps = config.norm_eps};
}

/// Learned positions, `position_embedding`.
class GlmVisionEmbeddings : public torch::nn::Module {
 public:
  explicit GlmVisionEmbeddings(const VisionConfig& config) {
    position_embedding_ = register_module(
        "position_embedding",
        std::make_shared<Hooked<Embedding>>(config.position_side * config.position_side, config.hidden_size));
  }

  at::Tensor forward(const at::Tensor& hidden, const VisionPlan& plan) {
    const auto here = [&](const at::Tensor& x) { return on_device(x, hidden.device()); };
    const auto rows = position_embedding_->forward(here(plan.taps));  // [P, 16, E]
    return hidden + (rows * here(plan.tap_weights).unsqueeze(-1)).sum(1).to(hidden.scalar_type());
  }
  std::string class_name() const { return "Glm4vMoeVisionEmbeddings"; }

 private:
  std::shared_ptr<Hooked<Embedding>> position_embedding_;
};

/// A linear layer, the GELU of its norm, and a gated MLP.
class GlmPatchMerger : public torch::nn::Module {
 public:
  GlmPatchMerger(const VisionConfig& config, int64_t width) : activation_(config.activation) {
    const int64_t out = config.out_hidden_size;
    const auto linear = [&](const char* name, int64_t from, int64_t to) {
      return register_module(name, std::make_shared<Hooked<Linear>>(Linear::Options{.in = from, .out = to}));
    };
    proj_ = linear("proj", out, out);
    norm_ = register_module("post_projection_norm",
                            std::make_shared<Hooked<Norm>>(NormSpec{
                                .class_name = "LayerNorm", .width = out, .kind = NormKind::kLayerNorm, .eps = 1e-5}));
    gate_ = linear("gate_proj", out, width);
    up_ = linear("up_proj", out, width);
    down_ = linear("down_proj", width, out);
  }

  at::Tensor forward(const at::Tensor& hidden) {  // [features, out] -> [features, out]
    const auto x = activate(norm_->forward(proj_->forward(hidden)), Activation::kGelu);
    return down_->forward(activate(gate_->forward(x), activation_) * up_->forward(x));
  }
  std::string class_name() const { return "Glm4vMoeVisionPatchMerger"; }

 private:
  Activation activation_;
  std::shared_ptr<Hooked<Linear>> proj_, gate_, up_, down_;
  std::shared_ptr<Hooked<Norm>> norm_;
};

class GlmVisionModel : public torch::nn::Module {
 public:
  GlmVisionModel(const VisionConfig& config, int64_t merger_width) : config_(config) {
    embeddings_ = register_module("embeddings", std::make_shared<Hooked<GlmVisionEmbeddings>>(config));
    patch_embed_ = register_module("patch_embed", std::make_shared<Hooked<PatchEmbed>>(config));
    const auto blocks = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
    for (int64_t i = 0; i < config.depth; ++i) {
      blocks_.push_back(std::make_shared<Hooked<VisionBlock>>(config));
      blocks->push_back(blocks_.back());
    }
    merger_ = register_module("merger", std::make_shared<Hooked<GlmPatchMerger>>(config, merger_width));
    const auto norm = [&](const char* name) {
      return register_module(name, std::make_shared<Hooked<Norm>>(rms_norm_of(config)));
    };
    post_conv_layernorm_ = norm("post_conv_layernorm");
    const std::array sizes{config.out_hidden_size, config.hidden_size, config.merge_size, config.merge_size};
    downsample_ = register_module("downsample", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
    post_layernorm_ = norm("post_layernorm");
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {  // -> [features, out], as given
    auto hidden = in_tower_order(post_conv_layernorm_->forward(patch_embed_->forward(patches)), plan);
    const VisionContext context{rotation(plan, hidden), on_device(plan.frames, hidden.device())};
    hidden = embeddings_->forward(hidden, plan);
    for (const auto& block : blocks_) hidden = block->forward(hidden, context);
    hidden = post_layernorm_->forward(hidden);
    // A channel of the merged patches follows the other, as in the convolution's weight.
    const auto units = hidden.unflatten(0, {-1, config_.merge_size * config_.merge_size}).transpose(1, 2).flatten(1);
    return in_given_order(merger_->forward(downsample_->forward(units)), plan);
  }
  std::string class_name() const { return config_.names.tower; }

 private:
  RotaryTables rotation(const VisionPlan& plan, const at::Tensor& hidden) {
    if (!frequencies_.defined() || frequencies_.device() != hidden.device()) {
      const c10::InferenceMode no_inference(false);  // training may use them later
      const int64_t head = config_.hidden_size / config_.num_heads;
      frequencies_ = on_device(inverse_frequencies({.theta = config_.rotary_theta}, head / 2), hidden.device());
    }
    return vision_tables(frequencies_, on_device(plan.positions, hidden.device()));
  }

  VisionConfig config_;
  std::shared_ptr<Hooked<GlmVisionEmbeddings>> embeddings_;
  std::shared_ptr<Hooked<PatchEmbed>> patch_embed_;
  std::vector<std::shared_ptr<Hooked<VisionBlock>>> blocks_;
  std::shared_ptr<Hooked<GlmPatchMerger>> merger_;
  std::shared_ptr<Hooked<Norm>> post_conv_layernorm_, post_layernorm_;
  std::shared_ptr<Hooked<PatchConvolution>> downsample_;
  at::Tensor frequencies_;  // of the rotation, on the device of the last forward
};

class GlmTower final : public PictureTower {
 public:
  GlmTower(const VisionConfig& config, int64_t merger_width)
      : visual_(std::make_shared<Hooked<GlmVisionModel>>(config, merger_width)) {}

  EncoderModules modules() override { return {{"visual", visual_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = visual_->forward(patches, plan), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<GlmVisionModel>> visual_;
};

}  // namespace

EncoderSpecPtr glm_vision(VisionLanguageConfig config, int64_t merger_width) {
  auto build = [vision = config.vision, merger_width] { return std::make_shared<GlmTower>(vision, merger_width); };
  return picture_encoder(std::move(config), visual_blocks(std::move(build)));
}

}  // namespace megashard
