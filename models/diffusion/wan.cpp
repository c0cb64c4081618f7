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

#include "models/diffusion/latent_families.h"
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
  const bool has_controls = !config.control_layers.empty();
  return {.class_name = has_controls ? "WanVACETransformer3DModel" : "WanTransformer3DModel",
          .patches = {.channels = config.out_channels, .patch = config.patch, .text_width = config.text_dim},
          .channels_last = true,
          .num_heads = config.num_heads,
          .blocks = has_controls ? std::vector<std::string>{"vace_blocks.{*}", "blocks.{*}"}
                                 : std::vector<std::string>{"blocks.{*}"},
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
  /// Returns what the control blocks add behind each layer; undefined: nothing.
  std::vector<at::Tensor> control_addends(const Batch& input, const at::Tensor& hidden, const WanPass& pass);

  WanConfig config_;
  std::shared_ptr<Hooked<PatchConvolution>> patch_embedding_, vace_patch_embedding_;  // the second: null without VACE
  std::shared_ptr<Hooked<WanTimeTextImageEmbedding>> condition_embedder_;
  std::vector<std::shared_ptr<Hooked<WanTransformerBlock>>> blocks_;
  std::vector<std::shared_ptr<Hooked<WanControlBlock>>> vace_blocks_;
  std::shared_ptr<Hooked<Linear>> proj_out_;
  at::Tensor scale_shift_table_;  // [1, 2, C]
};

WanTransformer3DModel::WanTransformer3DModel(const WanConfig& config)
    : LatentModel(latent_spec(config)), config_(config) {
  const int64_t width = config.width();
  const auto embedding = [&](const char* name, int64_t channels) {
    const std::vector<int64_t> sizes{width, channels, config.patch[0], config.patch[1], config.patch[2]};
    return register_module(name, std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/true));
  };
  patch_embedding_ = embedding("patch_embedding", config.in_channels);
  condition_embedder_ =
      register_module("condition_embedder", std::make_shared<Hooked<WanTimeTextImageEmbedding>>(config));
  if (!config.control_layers.empty()) {  // before the blocks, in the order of forward, for prefetching
    vace_patch_embedding_ = embedding("vace_patch_embedding", config.control_channels);
    const auto list = register_module("vace_blocks", std::make_shared<torch::nn::ModuleListImpl>());
    for (size_t i = 0; i < config.control_layers.size(); ++i) {
      vace_blocks_.push_back(std::make_shared<Hooked<WanControlBlock>>(config, /*is_first=*/i == 0));
      list->push_back(vace_blocks_.back());
    }
  }
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

std::vector<at::Tensor> WanTransformer3DModel::control_addends(const Batch& input, const at::Tensor& hidden,
                                                               const WanPass& pass) {
  std::vector<at::Tensor> addends(blocks_.size());
  if (vace_blocks_.empty()) return addends;
  const auto& controls = input.at(kControls);
  TORCH_CHECK(controls.dim() == 3 && controls.size(0) == config_.control_channels * config_.box(), class_name(),
              " takes controls [", config_.control_channels * config_.box(), ", B, T], got ", controls.sizes());
  auto states = vace_patch_embedding_->forward(controls.permute({1, 2, 0}).contiguous());
  for (size_t i = 0; i < vace_blocks_.size(); ++i) {
    auto next = vace_blocks_[i]->forward(states, hidden, pass);
    states = next.states;
    addends[static_cast<size_t>(config_.control_layers[i])] = next.addend;
  }
  return addends;
}

at::Tensor WanTransformer3DModel::predict(const Batch& input) {
  auto hidden = patch_embedding_->forward(with_conditions(input, config_.in_channels * config_.box()));
  WanPass pass{.conditions = conditions_of(input),
               .turns = patch_turns(input.at(kPositionIds), turned_widths(config_), kWanTheta),
               .clean = input.find(kCleanPatches),
               .key_mask = key_mask_of(input),
               .sequence = input.sequence};
  const auto addends = control_addends(input, hidden, pass);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    hidden = blocks_[i]->forward(hidden, pass);
    if (addends[i].defined()) hidden = hidden + addends[i];
  }
  const auto changes = (scale_shift_table_.to(at::kFloat) + pass.conditions.time.unsqueeze(2)).unbind(2);
  return proj_out_->forward(modulated_norm(hidden, {changes[1] + 1, changes[0]}, pass.clean, config_.eps));
}

std::vector<std::string> WanTransformer3DModel::patterns_of_part(const std::string& part) const {
  const char* inside = part == "layer"       ? ""
                       : part == "mlp"       ? ".ffn"
                       : part == "attn_proj" ? ".attn1.to_out.0"
                                             : nullptr;
  if (inside == nullptr) return {};
  auto patterns = spec().blocks;
  for (auto& pattern : patterns) pattern += inside;
  return patterns;
}

/// Products alone, as Megatron counts: of a patch, and of a sequence's text and timestep.
double WanTransformer3DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.width()), length = static_cast<double>(sequence_length),
             controls = static_cast<double>(config_.control_layers.size()),
             layers = static_cast<double>(config_.num_layers) + controls, box = static_cast<double>(config_.box());
  const double text = kWanTextLength, image = config_.image_dim > 0 ? kWanImageLength : 0;
  const double ffn = static_cast<double>(config_.ffn_dim), image_dim = static_cast<double>(config_.image_dim);
  const double patch_layer = 6 * width * width + 2 * width * ffn + 2 * width * (length + text + image);
  const auto channels = static_cast<double>(config_.in_channels + config_.out_channels + config_.control_channels);
  const double of_controls = controls > 0 ? (controls + 1) * width * width : 0;
  const double patch = layers * patch_layer + of_controls + width * box * channels;
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
