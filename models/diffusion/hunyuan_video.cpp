#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "models/diffusion/hunyuan_config.h"
#include "models/diffusion/hunyuan_text.h"
#include "models/diffusion/latent_families.h"
#include "models/vision/tower_parts.h"

namespace megashard {
namespace {

/// Tokens of the encoders, for the count of operations: language model, letters, picture.
constexpr int64_t kTextTokens = 1000, kGlyphTokens = 256, kPictureTokens = 729;

/// time_embed.
class HunyuanTimeEmbedding : public torch::nn::Module {
 public:
  explicit HunyuanTimeEmbedding(int64_t width) { mlp_ = register_time_mlp(*this, "timestep_embedder", width); }

  at::Tensor forward(const at::Tensor& timesteps) {  // [B] -> [B, C]
    return mlp_->forward(timestep_waves(timesteps, kJointWaves));
  }
  std::string class_name() const { return "HunyuanVideo15TimeEmbedding"; }

 private:
  std::shared_ptr<Hooked<LatentMlp>> mlp_;
};

/// x_embedder.
class HunyuanPatchEmbedding : public torch::nn::Module {
 public:
  explicit HunyuanPatchEmbedding(const HunyuanVideoConfig& config) {
    const std::vector<int64_t> sizes{config.sizes.width(), config.in_channels, config.patch_frames, config.patch,
                                     config.patch};
    proj_ = register_module("proj", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
  }

  at::Tensor forward(const at::Tensor& patches) { return proj_->forward(patches); }
  std::string class_name() const { return "HunyuanVideo15PatchEmbed"; }

 private:
  std::shared_ptr<Hooked<PatchConvolution>> proj_;
};

/// Features of an encoder, and which of them count. Without any: one that does not.
struct Encoded {
  at::Tensor features, mask;  // [B, L, D], [B, L] bool
};

class HunyuanVideo15Transformer3DModel final : public LatentModel {
 public:
  explicit HunyuanVideo15Transformer3DModel(const HunyuanVideoConfig& config);
  double training_flops(int64_t sequences, int64_t sequence_length) const override;
  WeightMap weight_map() const override;

 protected:
  at::Tensor predict(const Batch& input) override;

 private:
  Encoded encoded(const Batch& input, const char* features, const char* mask, int64_t width) const;
  Encoded picture(const Batch& input) const;
  Encoded context(const Batch& input, at::ScalarType dtype);
  at::Tensor patches(const Batch& input) const;

  HunyuanVideoConfig config_;
  std::shared_ptr<Hooked<HunyuanPatchEmbedding>> x_embedder_;
  std::shared_ptr<Hooked<ImageProjection>> image_embedder_;
  std::shared_ptr<Hooked<TokenRefiner>> context_embedder_;
  std::shared_ptr<Hooked<GlyphProjection>> context_embedder_2_;
  std::shared_ptr<Hooked<HunyuanTimeEmbedding>> time_embed_;
  std::shared_ptr<Hooked<Embedding>> cond_type_embed_;
  JointBlocks blocks_;
  JointOutput output_;
};

HunyuanVideo15Transformer3DModel::HunyuanVideo15Transformer3DModel(const HunyuanVideoConfig& config)
    : LatentModel({.class_name = "HunyuanVideo15Transformer3DModel",
                   .patches = {.channels = config.out_channels,
                               .patch = {config.patch_frames, config.patch, config.patch},
                               .text_width = config.text_dim},
                   .num_heads = config.sizes.num_heads,
                   .blocks = {"transformer_blocks.{*}"},
                   .takes_second_text = true}),
      config_(config) {
  const int64_t width = config.sizes.width();
  x_embedder_ = register_module("x_embedder", std::make_shared<Hooked<HunyuanPatchEmbedding>>(config));
  image_embedder_ =
      register_module("image_embedder", std::make_shared<Hooked<ImageProjection>>(config.image_dim, width));
  context_embedder_ =
      register_module("context_embedder",
                      std::make_shared<Hooked<TokenRefiner>>(config.text_dim, config.sizes, config.num_refiner_layers));
  context_embedder_2_ =
      register_module("context_embedder_2", std::make_shared<Hooked<GlyphProjection>>(config.glyph_dim, width));
  time_embed_ = register_module("time_embed", std::make_shared<Hooked<HunyuanTimeEmbedding>>(width));
  cond_type_embed_ = register_module("cond_type_embed", std::make_shared<Hooked<Embedding>>(3, width));
  const JointBlockNames names{.block = "HunyuanVideo15TransformerBlock",
                              .attention = "Attention",
                              .image_modulation = "norm1.linear",
                              .text_modulation = "norm1_context.linear",
                              .image_mlp = "ff",
                              .text_mlp = "ff_context"};
  blocks_ = register_joint_blocks(*this, names, config.sizes, config.num_layers);
  output_ = register_joint_output(*this, width, config.out_channels * config.box());
}

Encoded HunyuanVideo15Transformer3DModel::encoded(const Batch& input, const char* features, const char* mask,
                                                  int64_t width) const {
  const auto& latents = input.at(kLatents);
  const auto given = input.find(features), given_mask = input.find(mask);
  const auto options = latents.options();
  if (!given.defined())
    return {at::zeros({latents.size(1), 1, width}, options), at::zeros({latents.size(1), 1}, options.dtype(at::kBool))};
  TORCH_CHECK(given.dim() == 3 && given.size(2) == width, class_name(), " takes ", features, " [B, L, ", width,
              "], got ", given.sizes());
  if (given_mask.defined()) return {given, given_mask};
  return {given, at::ones({given.size(0), given.size(1)}, options.dtype(at::kBool))};
}

/// Zeros mean that there is no picture, as in the pipelines of text to video.
Encoded HunyuanVideo15Transformer3DModel::picture(const Batch& input) const {
  auto image = encoded(input, kImageFeatures, /*mask=*/"", config_.image_dim);
  image.mask = image.features.flatten(1).ne(0).any(1, /*keepdim=*/true).expand(image.mask.sizes());
  return image;
}

/// The text that patches attend to. Its order means nothing, since it has no positions.
Encoded HunyuanVideo15Transformer3DModel::context(const Batch& input, at::ScalarType dtype) {
  const auto text = encoded(input, kTextFeatures, kTextMask, config_.text_dim);
  const auto glyphs = encoded(input, kSecondText, kSecondTextMask, config_.glyph_dim);
  const auto image = picture(input);
  const auto kinds = cond_type_embed_->forward(at::arange(3, text.mask.options().dtype(at::kLong)));
  const auto refined = context_embedder_->forward(text.features.to(dtype), text.mask, input.at(kTimesteps));
  return {at::cat({image_embedder_->forward(image.features.to(dtype)) + kinds[2],
                   context_embedder_2_->forward(glyphs.features.to(dtype)) + kinds[1], refined + kinds[0]},
                  1),
          at::cat({image.mask, glyphs.mask, text.mask}, 1)};
}

/// Without conditions zeros take their place: text to video.
at::Tensor HunyuanVideo15Transformer3DModel::patches(const Batch& input) const {
  const int64_t values = config_.in_channels * config_.box();
  if (input.find(kConditions).defined()) return with_conditions(input, values);
  const auto latents = input.at(kLatents).permute({1, 2, 0});
  return at::constant_pad_nd(latents, {0, values - latents.size(2)});
}

at::Tensor HunyuanVideo15Transformer3DModel::predict(const Batch& input) {
  Streams hidden{.image = x_embedder_->forward(patches(input)), .text = {}};
  const auto encoders = context(input, hidden.image.scalar_type());
  const auto rows = joint_rows(input, encoders.features, encoders.mask);
  hidden.text = rows.text;
  const auto& positions = input.at(kPositionIds);
  const auto of_text = at::zeros({3, positions.size(1), rows.text.size(1)}, positions.options());
  const JointPass pass{.time = at::silu(time_embed_->forward(input.at(kTimesteps))),
                       .turns = patch_turns(at::cat({of_text, positions}, 2), config_.axes, config_.theta),
                       .key_mask = rows.key_mask,
                       .sequence = rows.sequence};
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  return output_.forward(hidden.image, pass);
}

WeightMap HunyuanVideo15Transformer3DModel::weight_map() const {
  auto map = LatentModel::weight_map();
  if (config_.has_original_files) add_original_hunyuan_forms(config_, map);
  return map;
}

/// Products alone, as Megatron counts.
double HunyuanVideo15Transformer3DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.sizes.width()), patches = static_cast<double>(sequence_length);
  const auto layers = static_cast<double>(config_.num_layers),
             refiners = static_cast<double>(config_.num_refiner_layers);
  const auto text_dim = static_cast<double>(config_.text_dim), glyph_dim = static_cast<double>(config_.glyph_dim),
             image_dim = static_cast<double>(config_.image_dim);
  const auto layer = [width](double tokens) { return tokens * (12 * width * width + 2 * width * tokens); };
  const double values = static_cast<double>((config_.in_channels + config_.out_channels) * config_.box());
  const double text = kTextTokens * width * text_dim + refiners * layer(kTextTokens);
  const double glyphs = kGlyphTokens * kGlyphWidth * (glyph_dim + kGlyphWidth + width);
  const double picture = kPictureTokens * image_dim * (image_dim + width);
  const double of_sample =
      width * (2 * (kJointWaves + width) + text_dim + width) + (12 * layers + 2 * refiners + 2) * width * width;
  const double blocks = layers * layer(patches + kTextTokens + kGlyphTokens + kPictureTokens);
  return 6 * static_cast<double>(sequences) * (blocks + patches * width * values + text + glyphs + picture + of_sample);
}

}  // namespace

std::shared_ptr<LatentModel> make_hunyuan_video(const HunyuanVideoConfig& config) {
  return std::make_shared<HunyuanVideo15Transformer3DModel>(config);
}

}  // namespace megashard
