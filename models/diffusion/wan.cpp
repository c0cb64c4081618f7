#include "models/diffusion/wan.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>
#include <utility>
#include <vector>

#include "models/diffusion/latent_parts.h"
#include "models/diffusion/wan_parts.h"
#include "models/vision/tower_parts.h"

namespace megashard {
namespace {

constexpr double kWanTheta = 10000;
/// Tokens of a prompt, to which Wan's text encoder pads.
constexpr int64_t kWanTextLength = 512;

/// Channels of a head that turn by frame, row and column.
std::vector<int64_t> turned_widths(const WanConfig& config) {
  const int64_t of_side = config.head_dim / 6 * 2;
  return {config.head_dim - 2 * of_side, of_side, of_side};
}

LatentSpec latent_spec(const WanConfig& config) {
  return {.class_name = "WanTransformer3DModel",
          .patches = {.channels = config.out_channels, .patch = config.patch, .text_width = config.text_dim},
          .channels_last = true,
          .num_heads = config.num_heads,
          .blocks = {"blocks.{*}"},
          .renamings = config.has_original_files ? original_wan_names(config) : std::vector<WeightRenaming>(),
          .in_fp32 = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}};
}

class WanTransformer3DModel final : public LatentModel, public SelfInitializing {
 public:
  explicit WanTransformer3DModel(const WanConfig& config);

  void init_own_weights(const WeightInit& init) override { init_table(scale_shift_table_, init); }
  double training_flops(int64_t sequences, int64_t sequence_length) const override;

 protected:
  at::Tensor predict(const Batch& input) override;
  std::vector<std::string> patterns_of_part(const std::string& part) const override;

 private:
  WanConditions conditions_of(const Batch& input);

  WanConfig config_;
  std::shared_ptr<Hooked<PatchConvolution>> patch_embedding_;
  std::shared_ptr<Hooked<WanTimeTextImageEmbedding>> condition_embedder_;
  std::vector<std::shared_ptr<Hooked<WanTransformerBlock>>> blocks_;
  std::shared_ptr<Hooked<Linear>> proj_out_;
  at::Tensor scale_shift_table_;  // [1, 2, C]
};

WanTransformer3DModel::WanTransformer3DModel(const WanConfig& config)
    : LatentModel(latent_spec(config)), config_(config) {
  const int64_t width = config.width();
  const auto& [frames, rows, columns] = config.patch;
  patch_embedding_ =
      register_module("patch_embedding",
                      std::make_shared<Hooked<PatchConvolution>>(
                          std::vector<int64_t>{width, config.in_channels, frames, rows, columns}, /*has_bias=*/true));
  condition_embedder_ =
      register_module("condition_embedder", std::make_shared<Hooked<WanTimeTextImageEmbedding>>(config));
  const auto blocks = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    blocks_.push_back(std::make_shared<Hooked<WanTransformerBlock>>(config));
    blocks->push_back(blocks_.back());
  }
  // It begins with zeros, as in Wan's own training.
  const Linear::Options out{.in = width, .out = config.out_channels * config.box(), .bias = true, .init_scale = 0};
  proj_out_ = register_module("proj_out", std::make_shared<Hooked<Linear>>(out));
  scale_shift_table_ = register_parameter("scale_shift_table", at::empty({1, 2, width}));
}

WanConditions WanTransformer3DModel::conditions_of(const Batch& input) {
  const auto& text = input.at(kTextFeatures);
  TORCH_CHECK(text.dim() == 3 && text.size(2) == config_.text_dim, class_name(), " takes text features [B, L, ",
              config_.text_dim, "], got ", text.sizes());
  auto timesteps = input.at(kTimesteps).unsqueeze(1);
  if (input.find(kCleanPatches).defined()) timesteps = at::cat({timesteps, at::zeros_like(timesteps)}, 1);
  return condition_embedder_->forward(timesteps, text, config_.image_dim > 0 ? input.at(kImageFeatures) : at::Tensor());
}

at::Tensor WanTransformer3DModel::predict(const Batch& input) {
  auto patches = input.at(kLatents);
  const int64_t further = (config_.in_channels - config_.out_channels) * config_.box();
  const auto conditions = input.find(kConditions);
  TORCH_CHECK((conditions.defined() ? conditions.size(0) : 0) == further, class_name(), " takes ", further,
              " values of conditions for a patch, and the data have ", conditions.defined() ? conditions.size(0) : 0,
              ": give those of its task (text to video has none)");
  if (conditions.defined()) patches = at::cat({patches, conditions.to(patches.scalar_type())});
  auto hidden = patch_embedding_->forward(patches.permute({1, 2, 0}).contiguous());
  WanPass pass{.conditions = conditions_of(input),
               .turns = patch_turns(input.at(kPositionIds), turned_widths(config_), kWanTheta),
               .clean = input.find(kCleanPatches),
               .key_mask = key_mask_of(input),
               .sequence = input.sequence};
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  const auto changes = (scale_shift_table_.to(at::kFloat) + pass.conditions.time.unsqueeze(2)).unbind(2);
  return proj_out_->forward(modulated_norm(hidden, {changes[1] + 1, changes[0]}, pass.clean, config_.eps));
}

std::vector<std::string> WanTransformer3DModel::patterns_of_part(const std::string& part) const {
  if (part == "layer") return spec().blocks;
  if (part == "mlp") return {"blocks.{*}.ffn"};
  if (part == "attn_proj") return {"blocks.{*}.attn1.to_out.0"};
  return {};
}

/// Products alone, as Megatron counts: of a patch, and of a sequence's text and timestep.
double WanTransformer3DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.width()), length = static_cast<double>(sequence_length),
             layers = static_cast<double>(config_.num_layers), box = static_cast<double>(config_.box());
  const double text = kWanTextLength, image = config_.image_dim > 0 ? kWanImageLength : 0;
  const double ffn = static_cast<double>(config_.ffn_dim), image_dim = static_cast<double>(config_.image_dim);
  const double patch_layer = 6 * width * width + 2 * width * ffn + 2 * width * (length + text + image);
  const double patch =
      layers * patch_layer + width * box * static_cast<double>(config_.in_channels + config_.out_channels);
  const double prompt = layers * 2 * width * width + width * (static_cast<double>(config_.text_dim) + width);
  const double picture = layers * 2 * width * width + image_dim * (image_dim + width);
  const double time = width * (static_cast<double>(config_.time_channels) + width) + 6 * width * width;
  return 6 * static_cast<double>(sequences) * (length * patch + text * prompt + image * picture + time);
}

}  // namespace

std::shared_ptr<LatentModel> make_wan(const WanConfig& config) {
  return std::make_shared<WanTransformer3DModel>(config);
}

}  // namespace megashard
