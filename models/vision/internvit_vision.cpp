#include "models/vision/internvit_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <array>
#include <utility>

#include "models/layers/fused_forms.h"
#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

/// The projection of patches, as `projection`.
class InternVitPatches : public torch::nn::Module {
 public:
  explicit InternVitPatches(const VisionConfig& config) : class_name_(config.names.patch_embed) {
    const std::array sizes{config.hidden_size, config.in_channels, config.patch_size, config.patch_size};
    projection_ = register_module("projection", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
  }

  at::Tensor forward(const at::Tensor& patches) { return projection_->forward(patches); }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<PatchConvolution>> projection_;
};

/// A class token and the patches of each tile, with learned positions.
class InternVitEmbeddings : public torch::nn::Module, public SelfInitializing {
 public:
  explicit InternVitEmbeddings(const VisionConfig& config) : side_(config.fixed_side) {
    cls_token_ = register_parameter("cls_token", at::empty({1, 1, config.hidden_size}));
    positions_ = register_parameter("position_embeddings", at::empty({1, side_ * side_ + 1, config.hidden_size}));
    patches_ = register_module("patch_embeddings", std::make_shared<Hooked<InternVitPatches>>(config));
  }

  /// patches [P, pixels] of `tiles`, and their places [P, 2] -> [P + tiles, hidden]
  at::Tensor forward(const at::Tensor& patches, const at::Tensor& places, int64_t tiles) {
    const auto numbers = places.select(1, 0) * side_ + places.select(1, 1) + 1;
    const auto table = positions_.squeeze(0);
    const auto placed = patches_->forward(patches) + table.index_select(0, numbers);
    const auto first = (cls_token_ + table.narrow(0, 0, 1)).expand({tiles, 1, -1});
    return at::cat({first, placed.unflatten(0, {tiles, -1})}, 1).flatten(0, 1);
  }
  void init_own_weights(const WeightInit&) override {
    cls_token_.zero_();
    positions_.zero_();
  }
  std::string class_name() const { return "InternVLVisionEmbeddings"; }

 private:
  int64_t side_;
  at::Tensor cls_token_, positions_;
  std::shared_ptr<Hooked<InternVitPatches>> patches_;
};

TowerLayerSpec internvit_layer(const VisionConfig& config, const InternVitSpec& spec) {
  const auto norm = [&](NormKind kind, double eps) {
    const bool is_rms = kind == NormKind::kRmsNorm;
    return NormSpec{.class_name = is_rms ? "InternVLVisionRMSNorm" : "LayerNorm",
                    .width = config.hidden_size,
                    .kind = kind,
                    .eps = eps};
  };
  TowerLayerSpec layer{.class_name = config.names.block,
                       .attention_class = config.names.attention,
                       .norms = {"layernorm_before", "layernorm_after"},
                       .parts = {"attention", "mlp"},
                       .out_proj = "projection_layer",
                       .norm = norm(spec.norm, config.norm_eps),
                       .num_heads = config.num_heads,
                       .qkv_bias = spec.qkv_bias,
                       .out_bias = true,
                       .mlp = PlainMlpSpec{.class_name = config.names.mlp,
                                           .hidden_size = config.hidden_size,
                                           .intermediate_size = config.intermediate_size,
                                           .activation = config.activation},
                       .scales = {"lambda_1", "lambda_2"},
                       .first_scale = spec.first_scale,
                       .drop_path = spec.drop_path};
  if (spec.qk_norm) layer.qk_norm = norm(NormKind::kRmsNorm, spec.chat_files ? config.norm_eps : 1e-6);
  return layer;
}

class InternVit : public torch::nn::Module {
 public:
  InternVit(const VisionConfig& config, const InternVitSpec& spec) : class_name_(config.names.tower) {
    embeddings_ = register_module("embeddings", std::make_shared<Hooked<InternVitEmbeddings>>(config));
    encoder_ = register_module("encoder", std::make_shared<Hooked<TowerStack>>(
                                              "InternVLVisionEncoder", internvit_layer(config, spec), config.depth,
                                              /*list=*/"layer"));
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {  // [P, pixels] -> [P, hidden]
    TORCH_INTERNAL_ASSERT(plan.frames.runs.size() == 1);
    const auto [length, tiles] = plan.frames.runs[0];
    const auto hidden = embeddings_->forward(patches, on_device(plan.positions, patches.device()), tiles);
    const auto seen = encoder_->forward(hidden, {{}, {.runs = {{length + 1, tiles}}, .order = {}, .inverse = {}}});
    return seen.unflatten(0, {tiles, -1}).narrow(1, 1, length).flatten(0, 1);
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<InternVitEmbeddings>> embeddings_;
  std::shared_ptr<Hooked<TowerStack>> encoder_;
};

/// Maps the norm of merge_size^2 joined patches by two linear layers.
class TileProjector : public torch::nn::Module {
 public:
  TileProjector(const VisionConfig& config, Activation activation)
      : width_(config.hidden_size * config.merge_size * config.merge_size), activation_(activation) {
    norm_ = register_module(
        "layer_norm", std::make_shared<Hooked<Norm>>(NormSpec{
                          .class_name = "LayerNorm", .width = width_, .kind = NormKind::kLayerNorm, .eps = 1e-5}));
    const auto linear = [&](const char* name, int64_t in) {
      return register_module(name, std::make_shared<Hooked<Linear>>(
                                       Linear::Options{.in = in, .out = config.out_hidden_size, .bias = true}));
    };
    linear_1_ = linear("linear_1", width_);
    linear_2_ = linear("linear_2", config.out_hidden_size);
  }

  at::Tensor forward(const at::Tensor& hidden) {  // [P, hidden] -> [P / merge^2, out]
    const auto normed = norm_->forward(hidden.reshape({-1, width_}));
    return linear_2_->forward(activate(linear_1_->forward(normed), activation_));
  }
  std::string class_name() const { return "InternVLMultiModalProjector"; }

 private:
  int64_t width_;
  Activation activation_;
  std::shared_ptr<Hooked<Norm>> norm_;
  std::shared_ptr<Hooked<Linear>> linear_1_, linear_2_;
};

class InternVitTower final : public PictureTower {
 public:
  InternVitTower(const VisionConfig& config, const InternVitSpec& spec)
      : tower_(std::make_shared<Hooked<InternVit>>(config, spec)),
        projector_(std::make_shared<Hooked<TileProjector>>(config, spec.projector_activation)) {}

  EncoderModules modules() override { return {{"vision_tower", tower_}, {"multi_modal_projector", projector_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = projector_->forward(tower_->forward(patches, plan)), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<InternVit>> tower_;
  std::shared_ptr<Hooked<TileProjector>> projector_;
};

/// The layers as InternVLChatModel's files have them: q, k and v in one, and other names.
std::vector<WeightGroup> chat_forms(const VisionConfig& config, const InternVitSpec& spec, const std::string& tower) {
  std::vector<WeightGroup> groups;
  const int64_t width = config.hidden_size;
  for (int64_t i = 0; i < config.depth; ++i) {
    const auto layer = tower + "encoder.layer." + std::to_string(i) + ".";
    auto qkv = fused_forms(layer + "attention.", {{"q_proj", width}, {"k_proj", width}, {"v_proj", width}}, "qkv",
                           width, spec.qkv_bias);
    for (auto& part : qkv.forms.front().parts) part.stored.replace(layer.size(), sizeof("attention") - 1, "attn");
    groups.push_back(std::move(qkv));
    const auto named = [&](const std::string& ours, const std::string& theirs, const std::vector<int64_t>& sizes) {
      const auto name = layer + ours;
      groups.push_back(
          {{{name, sizes}},
           {{"published", {whole_part(name, layer + theirs, sizes)}}, {"separate", {whole_part(name, name, sizes)}}}});
    };
    named("lambda_1", "ls1", {width});
    named("lambda_2", "ls2", {width});
    named("attention.projection_layer.weight", "attn.proj.weight", {width, width});
    named("attention.projection_layer.bias", "attn.proj.bias", {width});
    for (const std::string x : {"q", "k"}) {
      if (spec.qk_norm) named("attention." + x + "_norm.weight", "attn." + x + "_norm.weight", {width});
    }
    for (const auto& [ours, theirs] : {std::pair("layernorm_before", "norm1"), {"layernorm_after", "norm2"}}) {
      named(std::string(ours) + ".weight", std::string(theirs) + ".weight", {width});
      if (spec.norm == NormKind::kLayerNorm) named(std::string(ours) + ".bias", std::string(theirs) + ".bias", {width});
    }
  }
  return groups;
}

}  // namespace

EncoderSpecPtr internvit_vision(VisionLanguageConfig config, InternVitSpec spec) {
  PictureTowerSpec tower{.layers = "encoder.layer.{*}"};
  tower.build = [vision = config.vision, spec] { return std::make_shared<InternVitTower>(vision, spec); };
  if (spec.chat_files) {
    tower.forms = [vision = config.vision, spec](const std::string& path) { return chat_forms(vision, spec, path); };
  }
  return picture_encoder(std::move(config), std::move(tower));
}

}  // namespace megashard
