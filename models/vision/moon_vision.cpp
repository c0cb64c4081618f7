#include "models/vision/moon_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <array>
#include <utility>

#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

std::shared_ptr<Hooked<Norm>> layer_norm_of(int64_t width, double eps) {
  return std::make_shared<Hooked<Norm>>(
      NormSpec{.class_name = "LayerNorm", .width = width, .kind = NormKind::kLayerNorm, .eps = eps});
}

std::shared_ptr<Hooked<Linear>> biased(int64_t in, int64_t out) {
  return std::make_shared<Hooked<Linear>>(Linear::Options{.in = in, .out = out, .bias = true});
}

/// A learned table of positions, [rows, columns, hidden].
class MoonPositions : public torch::nn::Module, public SelfInitializing {
 public:
  explicit MoonPositions(const VisionConfig& config) {
    weight_ = register_parameter("weight", at::empty({config.position_side, config.position_side, config.hidden_size}));
  }

  at::Tensor forward(const at::Tensor& hidden, const VisionPlan& plan) {
    return interpolated_positions(weight_.flatten(0, 1), hidden, plan);
  }
  void init_own_weights(const WeightInit& init) override { weight_.normal_(0, init.std, init.generator); }
  std::string class_name() const { return "Kimi_K25VisionPositionEmbeddings"; }

 private:
  at::Tensor weight_;
};

class MoonPatchEmbed : public torch::nn::Module {
 public:
  explicit MoonPatchEmbed(const VisionConfig& config) : class_name_(config.names.patch_embed) {
    const std::array sizes{config.hidden_size, config.in_channels, config.patch_size, config.patch_size};
    proj_ = register_module("proj", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
    pos_emb_ = register_module("pos_emb", std::make_shared<Hooked<MoonPositions>>(config));
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {
    return pos_emb_->forward(in_tower_order(proj_->forward(patches), plan), plan);
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<PatchConvolution>> proj_;
  std::shared_ptr<Hooked<MoonPositions>> pos_emb_;
};

/// x + wo(attention(norm0(x))), then x + mlp(norm1(x)).
class MoonBlock : public torch::nn::Module {
 public:
  explicit MoonBlock(const VisionConfig& config) : class_name_(config.names.block), num_heads_(config.num_heads) {
    norm0_ = register_module("norm0", layer_norm_of(config.hidden_size, config.norm_eps));
    norm1_ = register_module("norm1", layer_norm_of(config.hidden_size, config.norm_eps));
    mlp_ = register_module(
        "mlp", std::make_shared<Hooked<PlainMlp>>(PlainMlpSpec{.class_name = config.names.mlp,
                                                               .names = {"fc0", "fc1"},
                                                               .hidden_size = config.hidden_size,
                                                               .intermediate_size = config.intermediate_size,
                                                               .activation = config.activation}));
    wqkv_ = register_module("wqkv", biased(config.hidden_size, 3 * config.hidden_size));
    wo_ = register_module("wo", biased(config.hidden_size, config.hidden_size));
  }

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context) {                   // [P, E] -> [P, E]
    const auto qkv = wqkv_->forward(norm0_->forward(hidden)).unflatten(1, {3, num_heads_, -1});  // [P, 3, H, D]
    const auto q = turned_neighbours(qkv.select(1, 0), context.rotary);
    const auto k = turned_neighbours(qkv.select(1, 1), context.rotary);
    const auto mixed = attend_within(q, k, qkv.select(1, 2), context.segments);
    const auto attended = hidden + wo_->forward(mixed.flatten(1));
    return attended + mlp_->forward(norm1_->forward(attended));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  int64_t num_heads_;
  std::shared_ptr<Hooked<Norm>> norm0_, norm1_;
  std::shared_ptr<Hooked<PlainMlp>> mlp_;
  std::shared_ptr<Hooked<Linear>> wqkv_, wo_;
};

class MoonEncoder : public torch::nn::Module {
 public:
  explicit MoonEncoder(const VisionConfig& config)
      : theta_(config.rotary_theta), head_(config.hidden_size / config.num_heads) {
    const auto blocks = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
    for (int64_t i = 0; i < config.depth; ++i) {
      blocks_.push_back(std::make_shared<Hooked<MoonBlock>>(config));
      blocks->push_back(blocks_.back());
    }
    final_layernorm_ = register_module("final_layernorm", layer_norm_of(config.hidden_size, config.norm_eps));
  }

  at::Tensor forward(at::Tensor hidden, const VisionPlan& plan) {
    const VisionContext context{rotation(plan, hidden.device()), on_device(plan.frames, hidden.device())};
    for (const auto& block : blocks_) hidden = block->forward(hidden, context);
    return final_layernorm_->forward(hidden);
  }
  std::string class_name() const { return "MoonViT3dEncoder"; }

 private:
  RotaryTables rotation(const VisionPlan& plan, c10::Device device) {
    if (!frequencies_.defined() || frequencies_.device() != device) {
      const c10::InferenceMode no_inference(false);  // training may use them later
      frequencies_ = on_device(inverse_frequencies({.theta = theta_}, head_ / 2), device);
    }
    const auto places = on_device(plan.positions, device).flip(1);  // column, row
    const auto angles = (places.to(at::kFloat).unsqueeze(1) * frequencies_.unsqueeze(1)).flatten(1);
    return {angles.cos(), angles.sin()};
  }

  double theta_;
  int64_t head_;  // channels
  std::vector<std::shared_ptr<Hooked<MoonBlock>>> blocks_;
  std::shared_ptr<Hooked<Norm>> final_layernorm_;
  at::Tensor frequencies_;  // [head / 4], on the device of the last forward
};

class MoonVit : public torch::nn::Module {
 public:
  explicit MoonVit(const VisionConfig& config) : class_name_(config.names.tower) {
    patch_embed_ = register_module("patch_embed", std::make_shared<Hooked<MoonPatchEmbed>>(config));
    encoder_ = register_module("encoder", std::make_shared<Hooked<MoonEncoder>>(config));
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {  // [P, pixels] -> [P, hidden]
    return encoder_->forward(patch_embed_->forward(patches, plan), plan);
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<MoonPatchEmbed>> patch_embed_;
  std::shared_ptr<Hooked<MoonEncoder>> encoder_;
};

/// Maps merge_size^2 normed patches, joined, by two linear layers.
class MoonProjector : public torch::nn::Module {
 public:
  MoonProjector(const VisionConfig& config, double eps)
      : class_name_(config.names.merger), width_(config.hidden_size * config.merge_size * config.merge_size) {
    pre_norm_ = register_module("pre_norm", layer_norm_of(config.hidden_size, eps));
    const auto proj = register_module("proj", std::make_shared<torch::nn::Module>("Sequential"));
    first_ = proj->register_module("0", biased(width_, width_));
    second_ = proj->register_module("2", biased(width_, config.out_hidden_size));
  }

  at::Tensor forward(const at::Tensor& hidden) {  // [P, hidden] -> [P / merge^2, out]
    const auto joined = pre_norm_->forward(hidden).reshape({-1, width_});
    return second_->forward(activate(first_->forward(joined), Activation::kGelu));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  int64_t width_;
  std::shared_ptr<Hooked<Norm>> pre_norm_;
  std::shared_ptr<Hooked<Linear>> first_, second_;
};

class MoonTower final : public PictureTower {
 public:
  MoonTower(const VisionConfig& config, double projector_norm_eps)
      : tower_(std::make_shared<Hooked<MoonVit>>(config)),
        projector_(std::make_shared<Hooked<MoonProjector>>(config, projector_norm_eps)) {}

  EncoderModules modules() override { return {{"vision_tower", tower_}, {"mm_projector", projector_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = in_given_order(projector_->forward(tower_->forward(patches, plan)), plan), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<MoonVit>> tower_;
  std::shared_ptr<Hooked<MoonProjector>> projector_;
};

}  // namespace

EncoderSpecPtr moon_vision(VisionLanguageConfig config, double projector_norm_eps) {
  auto build = [vision = config.vision, projector_norm_eps] {
    return std::make_shared<MoonTower>(vision, projector_norm_eps);
  };
  return picture_encoder(std::move(config), {.layers = "encoder.blocks.{*}",
                                             .qkv = "wqkv",
                                             .casts_inputs = false,  // tables of the rotation
                                             .build = std::move(build)});
}

}  // namespace megashard
