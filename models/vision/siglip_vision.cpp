#include "models/vision/siglip_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>

#include <array>
#include <utility>

#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

NormSpec layer_norm(const VisionConfig& config) {
  return {.class_name = config.names.norm,
          .width = config.hidden_size,
          .kind = NormKind::kLayerNorm,
          .eps = config.norm_eps};
}

/// Patches and their learned positions.
class SiglipEmbeddings : public torch::nn::Module {
 public:
  explicit SiglipEmbeddings(const VisionConfig& config) : side_(config.fixed_side) {
    const std::array sizes{config.hidden_size, config.in_channels, config.patch_size, config.patch_size};
    patch_embedding_ =
        register_module("patch_embedding", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
    position_embedding_ =
        register_module("position_embedding", std::make_shared<Hooked<Embedding>>(side_ * side_, config.hidden_size));
  }

  at::Tensor forward(const at::Tensor& patches, const at::Tensor& positions) {  // [P, pixels], [P, 2] -> [P, hidden]
    const auto numbers = positions.select(1, 0) * side_ + positions.select(1, 1);
    return patch_embedding_->forward(patches) + position_embedding_->forward(numbers);
  }
  std::string class_name() const { return "SiglipVisionEmbeddings"; }

 private:
  int64_t side_;
  std::shared_ptr<Hooked<PatchConvolution>> patch_embedding_;
  std::shared_ptr<Hooked<Embedding>> position_embedding_;
};

TowerLayerSpec siglip_layer(const VisionConfig& config) {
  return {.class_name = config.names.block,
          .attention_class = config.names.attention,
          .norms = {"layer_norm1", "layer_norm2"},
          .parts = {"self_attn", "mlp"},
          .out_proj = "out_proj",
          .norm = layer_norm(config),
          .num_heads = config.num_heads,
          .qkv_bias = true,
          .out_bias = true,
          .mlp = PlainMlpSpec{.class_name = config.names.mlp,
                              .hidden_size = config.hidden_size,
                              .intermediate_size = config.intermediate_size,
                              .activation = config.activation}};
}

class SiglipVisionModel : public torch::nn::Module {
 public:
  explicit SiglipVisionModel(const VisionConfig& config) : class_name_(config.names.tower) {
    embeddings_ = register_module("embeddings", std::make_shared<Hooked<SiglipEmbeddings>>(config));
    encoder_ = register_module(
        "encoder", std::make_shared<Hooked<TowerStack>>("SiglipEncoder", siglip_layer(config), config.depth));
    post_layernorm_ = register_module("post_layernorm", std::make_shared<Hooked<Norm>>(layer_norm(config)));
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {  // [P, pixels] -> [P, hidden]
    const auto hidden = embeddings_->forward(patches, on_device(plan.positions, patches.device()));
    return post_layernorm_->forward(encoder_->forward(hidden, {{}, on_device(plan.frames, patches.device())}));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<SiglipEmbeddings>> embeddings_;
  std::shared_ptr<Hooked<TowerStack>> encoder_;
  std::shared_ptr<Hooked<Norm>> post_layernorm_;
};

class MeanProjector : public torch::nn::Module, public SelfInitializing {
 public:
  MeanProjector(const VisionConfig& config, const NormSpec& norm) : patches_(config.merge_size * config.merge_size) {
    projection_ =
        register_parameter("mm_input_projection_weight", at::empty({config.hidden_size, config.out_hidden_size}));
    norm_ = register_module("mm_soft_emb_norm", std::make_shared<Hooked<Norm>>(norm));
  }

  at::Tensor forward(const at::Tensor& hidden) {  // [P, hidden] -> [P / merge^2, out]
    return at::matmul(norm_->forward(hidden.unflatten(0, {-1, patches_}).mean(1)), projection_);
  }
  void init_own_weights(const WeightInit& init) override { projection_.normal_(0, init.std, init.generator); }
  std::string class_name() const { return "Gemma3MultiModalProjector"; }

 private:
  int64_t patches_;
  at::Tensor projection_;
  std::shared_ptr<Hooked<Norm>> norm_;
};

class SiglipTower final : public PictureTower {
 public:
  SiglipTower(const VisionConfig& config, const NormSpec& norm)
      : tower_(std::make_shared<Hooked<SiglipVisionModel>>(config)),
        projector_(std::make_shared<Hooked<MeanProjector>>(config, norm)) {}

  EncoderModules modules() override { return {{"vision_tower", tower_}, {"multi_modal_projector", projector_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = projector_->forward(tower_->forward(patches, plan)), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<SiglipVisionModel>> tower_;
  std::shared_ptr<Hooked<MeanProjector>> projector_;
};

}  // namespace

EncoderSpecPtr siglip_vision(VisionLanguageConfig config, NormSpec projector_norm) {
  auto build = [vision = config.vision, norm = std::move(projector_norm)] {
    return std::make_shared<SiglipTower>(vision, norm);
  };
  return picture_encoder(std::move(config), {.layers = "encoder.layers.{*}", .build = std::move(build)});
}

}  // namespace megashard
