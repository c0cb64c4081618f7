#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "models/diffusion/joint_model.h"
#include "models/diffusion/joint_parts.h"
#include "models/diffusion/latent_families.h"
#include "models/diffusion/latent_parts.h"

namespace megashard {
namespace {

constexpr double kFluxTheta = 10000;
/// Tokens of a prompt, to which Flux's T5 pads.
constexpr int64_t kFluxTextLength = 512;
constexpr double kTimestepRange = 1000;

struct FluxConfig {
  int64_t in_channels = 64, out_channels = 64;  ///< packed: 2 x 2 latents
  int64_t num_layers = 19, num_single_layers = 38;
  JointSizes sizes{.num_heads = 24, .head_dim = 128};
  int64_t text_dim = 4096, pooled_dim = 768;
  bool has_guidance = false;
  std::vector<int64_t> axes{16, 56, 56};
};

/// to_q, to_k, to_v, norm_q, norm_k of text and patches together.
class FluxSingleAttention : public torch::nn::Module {
 public:
  explicit FluxSingleAttention(const JointSizes& sizes) : num_heads_(sizes.num_heads) {
    for (size_t i = 0; i < 3; ++i) {
      constexpr const char* kNames[] = {"to_q", "to_k", "to_v"};
      const auto options = xavier_linear(sizes.width(), sizes.width());
      projections_[i] = register_module(kNames[i], std::make_shared<Hooked<Linear>>(options));
    }
    norms_ = {register_head_norm(*this, "norm_q", sizes.head_dim), register_head_norm(*this, "norm_k", sizes.head_dim)};
  }

  at::Tensor forward(const at::Tensor& normed, const JointPass& pass) {
    const auto heads = [&](size_t i) { return projections_[i]->forward(normed).unflatten(-1, {num_heads_, -1}); };
    return joint_mix(norms_[0]->forward(heads(0)), norms_[1]->forward(heads(1)), heads(2), pass);
  }
  std::string class_name() const { return "FluxAttention"; }

 private:
  int64_t num_heads_;
  std::array<std::shared_ptr<Hooked<Linear>>, 3> projections_;
  std::array<std::shared_ptr<Hooked<Norm>>, 2> norms_;
};

/// Attention and an MLP of the same input.
class FluxSingleTransformerBlock : public torch::nn::Module {
 public:
  explicit FluxSingleTransformerBlock(const JointSizes& sizes) {
    const int64_t width = sizes.width();
    norm_ = register_linear_at(*this, "norm.linear", {.in = width, .out = 3 * width, .bias = true, .init_scale = 0});
    attn_ = register_module("attn", std::make_shared<Hooked<FluxSingleAttention>>(sizes));
    proj_mlp_ = register_module("proj_mlp", std::make_shared<Hooked<Linear>>(xavier_linear(width, 4 * width)));
    proj_out_ = register_module("proj_out", std::make_shared<Hooked<Linear>>(xavier_linear(5 * width, width)));
  }

  at::Tensor forward(const at::Tensor& hidden, const JointPass& pass) {  // [B, rows, C]
    const auto changes = modulations(norm_->forward(pass.time), 3);
    const auto normed = modulated_norm(hidden, {changes[1] + 1, changes[0]}, {}, kJointEps);
    const auto wide = at::gelu(proj_mlp_->forward(normed), "tanh");
    return gated_sum(hidden, proj_out_->forward(at::cat({attn_->forward(normed, pass), wide}, -1)), changes[2], {});
  }

 private:
  std::shared_ptr<Hooked<Linear>> norm_, proj_mlp_, proj_out_;
  std::shared_ptr<Hooked<FluxSingleAttention>> attn_;
};

std::vector<std::string> flux_units(const FluxConfig& config) {
  std::vector<std::string> units;
  if (config.num_layers > 0) units.emplace_back("transformer_blocks.{*}");
  if (config.num_single_layers > 0) units.emplace_back("single_transformer_blocks.{*}");
  return units;
}

class FluxTransformer2DModel final : public LatentModel {
 public:
  explicit FluxTransformer2DModel(const FluxConfig& config);
  double training_flops(int64_t sequences, int64_t sequence_length) const override;

 protected:
  at::Tensor predict(const Batch& input) override;

 private:
  FluxConfig config_;
  std::shared_ptr<Hooked<TimestepTextEmbedding>> time_text_embed_;
  std::shared_ptr<Hooked<Linear>> context_embedder_, x_embedder_;
  JointBlocks blocks_;
  std::vector<std::shared_ptr<Hooked<FluxSingleTransformerBlock>>> single_blocks_;
  JointOutput output_;
};

FluxTransformer2DModel::FluxTransformer2DModel(const FluxConfig& config)
    : LatentModel({.class_name = "FluxTransformer2DModel",
                   .patches = {.channels = config.out_channels / 4, .patch = {1, 2, 2}, .text_width = config.text_dim},
                   .num_heads = config.sizes.num_heads,
                   .blocks = flux_units(config)}),
      config_(config) {
  const int64_t width = config.sizes.width();
  const auto linear = [&](const char* name, const Linear::Options& options) {
    return register_module(name, std::make_shared<Hooked<Linear>>(options));
  };
  time_text_embed_ = register_module("time_text_embed", std::make_shared<Hooked<TimestepTextEmbedding>>(
                                                            width, config.pooled_dim, config.has_guidance));
  context_embedder_ = linear("context_embedder", xavier_linear(config.text_dim, width));
  x_embedder_ = linear("x_embedder", xavier_linear(config.in_channels, width));
  const JointBlockNames names{.block = "FluxTransformerBlock",
                              .attention = "FluxAttention",
                              .image_modulation = "norm1.linear",
                              .text_modulation = "norm1_context.linear",
                              .image_mlp = "ff",
                              .text_mlp = "ff_context"};
  blocks_ = register_joint_blocks(*this, names, config.sizes, config.num_layers);
  const auto singles = register_module("single_transformer_blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.num_single_layers; ++i) {
    single_blocks_.push_back(std::make_shared<Hooked<FluxSingleTransformerBlock>>(config.sizes));
    singles->push_back(single_blocks_.back());
  }
  output_ = register_joint_output(*this, width, config.out_channels);
}

at::Tensor FluxTransformer2DModel::predict(const Batch& input) {
  const auto dtype = x_embedder_->weight.scalar_type();
  const auto patches = with_conditions(input, config_.in_channels);
  const auto rows = joint_rows(input, input.at(kTextFeatures).to(dtype), /*text_mask=*/{});
  Streams hidden{.image = x_embedder_->forward(patches.to(dtype)), .text = context_embedder_->forward(rows.text)};
  const auto timesteps = input.at(kTimesteps) / kTimestepRange;  // rounds as diffusers does
  const auto guidance = input.find(kGuidance);
  const auto time = time_text_embed_->forward(
      timesteps * kTimestepRange, (guidance.defined() ? guidance : at::ones_like(timesteps)) * kTimestepRange,
      input.at(kPooledText));
  const auto& positions = input.at(kPositionIds);
  const auto of_text = at::zeros({3, positions.size(1), rows.text.size(1)}, positions.options());
  const JointPass pass{.time = at::silu(time),
                       .turns = patch_turns(at::cat({of_text, positions}, 2), config_.axes, kFluxTheta),
                       .key_mask = rows.key_mask,
                       .sequence = rows.sequence};
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  auto joined = at::cat({hidden.text, hidden.image}, 1);
  for (const auto& block : single_blocks_) joined = block->forward(joined, pass);
  const auto image = joined.narrow(1, rows.text.size(1), hidden.image.size(1));
  return output_.forward(image, pass);
}

/// Products alone, as Megatron counts.
double FluxTransformer2DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.sizes.width()), patches = static_cast<double>(sequence_length);
  const auto layers = static_cast<double>(config_.num_layers), singles = static_cast<double>(config_.num_single_layers);
  const double tokens = patches + kFluxTextLength;
  const double of_token = (layers + singles) * (12 * width * width + 2 * width * tokens);
  const double embedded = patches * static_cast<double>(config_.in_channels + config_.out_channels) +
                          kFluxTextLength * static_cast<double>(config_.text_dim);
  const double embedders =
      (config_.has_guidance ? 2 : 1) * (kJointWaves + width) + (static_cast<double>(config_.pooled_dim) + width);
  const double of_sample = width * (embedders + (12 * layers + 3 * singles + 2) * width);
  return 6 * static_cast<double>(sequences) * (tokens * of_token + width * embedded + of_sample);
}

}  // namespace

std::shared_ptr<LatentModel> make_flux(const HfConfig& config) {
  require_known_keys(config, {"patch_size", "in_channels", "out_channels", "num_layers", "num_single_layers",
                              "attention_head_dim", "num_attention_heads", "joint_attention_dim",
                              "pooled_projection_dim", "guidance_embeds", "axes_dims_rope"});
  FluxConfig flux;
  flux.in_channels = config.get("in_channels", flux.in_channels);
  flux.out_channels = config.get_or_null("out_channels", flux.in_channels);
  flux.num_layers = config.get("num_layers", flux.num_layers);
  flux.num_single_layers = config.get("num_single_layers", flux.num_single_layers);
  flux.sizes = {.num_heads = config.get("num_attention_heads", flux.sizes.num_heads),
                .head_dim = config.get("attention_head_dim", flux.sizes.head_dim)};
  flux.text_dim = config.get("joint_attention_dim", flux.text_dim);
  flux.pooled_dim = config.get("pooled_projection_dim", flux.pooled_dim);
  flux.has_guidance = config.get("guidance_embeds", flux.has_guidance);
  flux.axes = config.get("axes_dims_rope", flux.axes);
  config.require_computed(config.get("patch_size", int64_t{1}) == 1, "patch_size must be 1: latents are packed");
  TORCH_CHECK(flux.out_channels % 4 == 0 && flux.in_channels >= flux.out_channels, config.path(),
              ": out_channels must be a multiple of 4, and not more than in_channels");
  require_axes(config, flux.axes, flux.sizes.head_dim);
  return std::make_shared<FluxTransformer2DModel>(flux);
}

}  // namespace megashard
