#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>
#include <utility>
#include <vector>

#include "models/diffusion/joint_model.h"
#include "models/diffusion/joint_parts.h"
#include "models/diffusion/latent_families.h"
#include "models/diffusion/latent_parts.h"

namespace megashard {
namespace {

constexpr double kQwenTheta = 10000;
/// Tokens of a prompt, for the count of operations; its encoder does not pad.
constexpr int64_t kQwenTextLength = 512;
constexpr double kQwenTimesteps = 1000;

struct QwenImageConfig {
  int64_t in_channels = 64;   ///< channels of packed latents
  int64_t out_channels = 16;  ///< channels of latents
  int64_t num_layers = 60;
  JointSizes sizes{.num_heads = 24, .head_dim = 128};
  int64_t text_dim = 3584;
  std::vector<int64_t> axes{16, 56, 56};
};

/// timestep_embedder.
class QwenTimestepProjEmbeddings : public torch::nn::Module {
 public:
  explicit QwenTimestepProjEmbeddings(int64_t width) {
    timestep_ = register_time_mlp(*this, "timestep_embedder", width);
  }

  at::Tensor forward(const at::Tensor& timesteps) {  // [B] in 0 .. 1 -> [B, C]
    return timestep_->forward(timestep_waves(timesteps, kJointWaves, kQwenTimesteps));
  }

 private:
  std::shared_ptr<Hooked<LatentMlp>> timestep_;
};

/// The rows and columns of a picture are counted from its middle, the text's tokens from its largest side on.
struct QwenPositions {
  at::Tensor patches, text;  // [3, B, T], [3, B, L] of this rank's rows
};

QwenPositions qwen_positions(const Batch& input, const at::Tensor& numbers) {
  const auto& own = input.at(kPositionIds);
  const auto sizes = std::get<0>(whole_of_rows(own, 2, input.sequence).max(2)).add(1);  // [3, B]
  const auto half = sizes.div(2, "floor");
  const auto rows = own[1] - (sizes[1] - half[1]).unsqueeze(1), columns = own[2] - (sizes[2] - half[2]).unsqueeze(1);
  const auto of_text = at::maximum(half[1], half[2]).unsqueeze(1) + numbers;  // [B, L]
  return {at::stack({own[0], rows, columns}), of_text.unsqueeze(0).expand({3, -1, -1})};
}

class QwenImageTransformer2DModel final : public LatentModel {
 public:
  explicit QwenImageTransformer2DModel(const QwenImageConfig& config);
  double training_flops(int64_t sequences, int64_t sequence_length) const override;

 protected:
  at::Tensor predict(const Batch& input) override;

 private:
  QwenImageConfig config_;
  std::shared_ptr<Hooked<QwenTimestepProjEmbeddings>> time_text_embed_;
  std::shared_ptr<Hooked<Norm>> txt_norm_;
  std::shared_ptr<Hooked<Linear>> img_in_, txt_in_;
  JointBlocks blocks_;
  JointOutput output_;
};

QwenImageTransformer2DModel::QwenImageTransformer2DModel(const QwenImageConfig& config)
    : LatentModel({.class_name = "QwenImageTransformer2DModel",
                   .patches = {.channels = config.out_channels, .patch = {1, 2, 2}, .text_width = config.text_dim},
                   .num_heads = config.sizes.num_heads,
                   .blocks = {"transformer_blocks.{*}"}}),
      config_(config) {
  const int64_t width = config.sizes.width();
  const auto linear = [&](const char* name, const Linear::Options& options) {
    return register_module(name, std::make_shared<Hooked<Linear>>(options));
  };
  time_text_embed_ = register_module("time_text_embed", std::make_shared<Hooked<QwenTimestepProjEmbeddings>>(width));
  const NormSpec norm{.class_name = "RMSNorm", .width = config.text_dim, .eps = kJointEps};
  txt_norm_ = register_module("txt_norm", std::make_shared<Hooked<Norm>>(norm));
  img_in_ = linear("img_in", xavier_linear(config.in_channels, width));
  txt_in_ = linear("txt_in", xavier_linear(config.text_dim, width));
  const JointBlockNames names{.block = "QwenImageTransformerBlock",
                              .attention = "Attention",
                              .image_modulation = "img_mod.1",
                              .text_modulation = "txt_mod.1",
                              .image_mlp = "img_mlp",
                              .text_mlp = "txt_mlp"};
  blocks_ = register_joint_blocks(*this, names, config.sizes, config.num_layers);
  output_ = register_joint_output(*this, width, 4 * config.out_channels);
}

at::Tensor QwenImageTransformer2DModel::predict(const Batch& input) {
  const auto dtype = img_in_->weight.scalar_type();
  const auto rows = joint_rows(input, input.at(kTextFeatures).to(dtype), input.find(kTextMask));
  Streams hidden{.image = img_in_->forward(with_conditions(input, config_.in_channels).to(dtype)),
                 .text = txt_in_->forward(txt_norm_->forward(rows.text))};
  const auto positions = qwen_positions(input, rows.numbers);
  const JointPass pass{.time = at::silu(time_text_embed_->forward(input.at(kTimesteps) / kQwenTimesteps)),
                       .turns = patch_turns(at::cat({positions.text, positions.patches}, 2), config_.axes, kQwenTheta),
                       .key_mask = rows.key_mask,
                       .sequence = rows.sequence};
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  return output_.forward(hidden.image, pass);
}

/// Products alone, as Megatron counts.
double QwenImageTransformer2DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.sizes.width()), patches = static_cast<double>(sequence_length);
  const auto layers = static_cast<double>(config_.num_layers);
  const double tokens = patches + kQwenTextLength;
  const double embedded = patches * static_cast<double>(config_.in_channels + 4 * config_.out_channels) +
                          kQwenTextLength * static_cast<double>(config_.text_dim);
  const double of_sample = width * (kJointWaves + width + (12 * layers + 2) * width);
  const double products = tokens * layers * (12 * width * width + 2 * width * tokens) + width * embedded + of_sample;
  return 6 * static_cast<double>(sequences) * products;
}

}  // namespace

std::shared_ptr<LatentModel> make_qwen_image(const HfConfig& config) {
  require_known_keys(config, {"patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim",
                              "num_attention_heads", "joint_attention_dim", "guidance_embeds", "axes_dims_rope",
                              "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "pooled_projection_dim"});
  QwenImageConfig qwen;
  qwen.in_channels = config.get("in_channels", qwen.in_channels);
  qwen.out_channels = config.get_or_null("out_channels", qwen.in_channels);
  qwen.num_layers = config.get("num_layers", qwen.num_layers);
  qwen.sizes = {.num_heads = config.get("num_attention_heads", qwen.sizes.num_heads),
                .head_dim = config.get("attention_head_dim", qwen.sizes.head_dim)};
  qwen.text_dim = config.get("joint_attention_dim", qwen.text_dim);
  qwen.axes = config.get("axes_dims_rope", qwen.axes);
  for (const char* key : {"guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"})
    config.require_computed(!config.get(key, false), key, " is true, which is not supported: train Qwen-Image itself");
  TORCH_CHECK(config.get("patch_size", int64_t{2}) == 2 && qwen.in_channels >= 4 * qwen.out_channels, config.path(),
              ": patch_size must be 2, and in_channels 4 times out_channels or more");
  require_axes(config, qwen.axes, qwen.sizes.head_dim);
  return std::make_shared<QwenImageTransformer2DModel>(qwen);
}

}  // namespace megashard
