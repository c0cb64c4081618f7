#include "models/vision/step_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/modulelist.h>

#include <array>
#include <cmath>
#include <utility>

#include "models/vision/picture_encoder.h"
#include "models/vision/tower_parts.h"
#include "parallel/copies/on_device.h"

namespace megashard {
namespace {

std::shared_ptr<Hooked<Norm>> step_norm(const VisionConfig& config) {
  return std::make_shared<Hooked<Norm>>(NormSpec{
      .class_name = "LayerNorm", .width = config.hidden_size, .kind = NormKind::kLayerNorm, .eps = config.norm_eps});
}

/// Attention whose projections of queries, keys and values are one, `in_proj_weight` and `in_proj_bias`. Neighbours
/// among a head's channels turn together.
class StepAttention : public torch::nn::Module, public SelfInitializing {
 public:
  explicit StepAttention(const VisionConfig& config) : num_heads_(config.num_heads) {
    const int64_t width = config.hidden_size;
    weight_ = register_parameter("in_proj_weight", at::empty({3 * width, width}));
    bias_ = register_parameter("in_proj_bias", at::empty({3 * width}));
    out_proj_ = register_module(
        "out_proj", std::make_shared<Hooked<Linear>>(Linear::Options{.in = width, .out = width, .bias = true}));
  }

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context) {          // [P, E] -> [P, E]
    const auto qkv = linear(hidden, weight_, bias_).unflatten(1, {3, num_heads_, -1});  // [P, 3, H, D]
    const auto q = turned_neighbours(qkv.select(1, 0), context.rotary);
    const auto k = turned_neighbours(qkv.select(1, 1), context.rotary);
    return out_proj_->forward(attend_within(q, k, qkv.select(1, 2), context.segments).flatten(1));
  }
  void init_own_weights(const WeightInit& init) override {
    weight_.normal_(0, init.std, init.generator);
    bias_.zero_();
  }
  std::string class_name() const { return "EncoderVisionAttention"; }

 private:
  int64_t num_heads_;
  at::Tensor weight_, bias_;
  std::shared_ptr<Hooked<Linear>> out_proj_;
};

/// A vector that multiplies a branch: `gamma`.
class StepScale : public torch::nn::Module, public SelfInitializing {
 public:
  StepScale(int64_t width, double first) : first_(first) { gamma_ = register_parameter("gamma", at::empty({width})); }

  at::Tensor forward(const at::Tensor& x) { return x * gamma_; }
  void init_own_weights(const WeightInit&) override { gamma_.fill_(first_); }
  std::string class_name() const { return "EncoderLayerScale"; }

 private:
  double first_;
  at::Tensor gamma_;
};

/// x + ls_1(attn(ln_1(x))), then x + ls_2(mlp(ln_2(x))).
class StepBlock : public torch::nn::Module {
 public:
  StepBlock(const VisionConfig& config, double first_scale) : class_name_(config.names.block) {
    attn_ = register_module("attn", std::make_shared<Hooked<StepAttention>>(config));
    mlp_ = register_module(
        "mlp", std::make_shared<Hooked<PlainMlp>>(PlainMlpSpec{.class_name = config.names.mlp,
                                                               .names = {"c_fc", "c_proj"},
                                                               .hidden_size = config.hidden_size,
                                                               .intermediate_size = config.intermediate_size,
                                                               .activation = config.activation}));
    ln_1_ = register_module("ln_1", step_norm(config));
    ln_2_ = register_module("ln_2", step_norm(config));
    const auto scale = [&](const char* name) {
      return register_module(name, std::make_shared<Hooked<StepScale>>(config.hidden_size, first_scale));
    };
    ls_1_ = scale("ls_1");
    ls_2_ = scale("ls_2");
  }

  at::Tensor forward(const at::Tensor& hidden, const VisionContext& context) {
    const auto attended = hidden + ls_1_->forward(attn_->forward(ln_1_->forward(hidden), context));
    return attended + ls_2_->forward(mlp_->forward(ln_2_->forward(attended)));
  }
  std::string class_name() const { return class_name_; }

 private:
  std::string class_name_;
  std::shared_ptr<Hooked<StepAttention>> attn_;
  std::shared_ptr<Hooked<PlainMlp>> mlp_;
  std::shared_ptr<Hooked<Norm>> ln_1_, ln_2_;
  std::shared_ptr<Hooked<StepScale>> ls_1_, ls_2_;
};

class StepTransformer : public torch::nn::Module {
 public:
  StepTransformer(const VisionConfig& config, double first_scale)
      : theta_(config.rotary_theta), head_(config.hidden_size / config.num_heads) {
    const auto blocks = register_module("resblocks", std::make_shared<torch::nn::ModuleListImpl>());
    for (int64_t i = 0; i < config.depth; ++i) {
      blocks_.push_back(std::make_shared<Hooked<StepBlock>>(config, first_scale));
      blocks->push_back(blocks_.back());
    }
  }

  at::Tensor forward(at::Tensor hidden, const VisionPlan& plan) {
    const auto device = hidden.device();
    if (!frequencies_.defined() || frequencies_.device() != device) {
      const c10::InferenceMode no_inference(false);  // training may use them later
      frequencies_ = on_device(inverse_frequencies({.theta = theta_}, head_ / 2), device);
    }
    const auto places = on_device(plan.positions, device).flip(1);  // column, row
    const VisionContext context{vision_tables(frequencies_, places), on_device(plan.frames, device)};
    for (const auto& block : blocks_) hidden = block->forward(hidden, context);
    return hidden;
  }
  std::string class_name() const { return "EncoderVisionTransformer"; }

 private:
  double theta_;
  int64_t head_;  // channels
  std::vector<std::shared_ptr<Hooked<StepBlock>>> blocks_;
  at::Tensor frequencies_;  // [head / 4], on the device of the last forward
};

/// A convolution of 3 x 3 by steps of 2, whose border is zero.
class HalvingConvolution : public torch::nn::Module, public SelfInitializing {
 public:
  explicit HalvingConvolution(int64_t channels) {
    weight_ = register_parameter("weight", at::empty({2 * channels, channels, 3, 3}));
    bias_ = register_parameter("bias", at::empty({2 * channels}));
  }

  at::Tensor forward(const at::Tensor& x) { return at::conv2d(x, weight_, bias_, {2, 2}, {1, 1}); }
  void init_own_weights(const WeightInit& init) override {
    weight_.normal_(0, init.std, init.generator);
    bias_.zero_();
  }
  std::string class_name() const { return "Conv2d"; }

 private:
  at::Tensor weight_, bias_;
};

class StepVisionModel : public torch::nn::Module, public SelfInitializing {
 public:
  StepVisionModel(const VisionConfig& config, double first_scale) : config_(config) {
    const int64_t width = config.hidden_size;
    positional_embedding_ =
        register_parameter("positional_embedding", at::empty({config.position_side * config.position_side, width}));
    const std::array sizes{width, config.in_channels, config.patch_size, config.patch_size};
    conv1_ = register_module("conv1", std::make_shared<Hooked<PatchConvolution>>(sizes, /*has_bias=*/false));
    ln_pre_ = register_module("ln_pre", step_norm(config));
    transformer_ = register_module("transformer", std::make_shared<Hooked<StepTransformer>>(config, first_scale));
    vit_downsampler1_ = register_module("vit_downsampler1", std::make_shared<Hooked<HalvingConvolution>>(width));
    vit_downsampler2_ = register_module("vit_downsampler2", std::make_shared<Hooked<HalvingConvolution>>(2 * width));
  }

  at::Tensor forward(const at::Tensor& patches, const VisionPlan& plan) {  // -> [P / 16, 4 * hidden]
    const auto hidden = in_tower_order(conv1_->forward(patches), plan);
    const auto placed = interpolated_positions(positional_embedding_, hidden, plan);
    const auto seen = transformer_->forward(ln_pre_->forward(placed), plan);
    std::vector<at::Tensor> features;
    int64_t first = 0;
    for (const auto& [length, count] : plan.frames.runs) {  // tiles of one size
      features.push_back(downsampled(seen.narrow(0, first, length * count), length, count));
      first += length * count;
    }
    return features.size() == 1 ? features[0] : at::cat(features);
  }
  void init_own_weights(const WeightInit& init) override { positional_embedding_.normal_(0, init.std, init.generator); }
  std::string class_name() const { return config_.names.tower; }

 private:
  /// [count * length, C], in units of 4 x 4 -> [count * length / 16, 4 C]
  at::Tensor downsampled(const at::Tensor& hidden, int64_t length, int64_t count) {
    const int64_t merge = config_.merge_size, side = std::llround(std::sqrt(length)), units = side / merge;
    const auto map = hidden.unflatten(0, {count, units, units, merge, merge}).permute({0, 5, 1, 3, 2, 4});
    const auto pixels = map.reshape({count, hidden.size(1), side, side});
    const auto halved = vit_downsampler2_->forward(vit_downsampler1_->forward(pixels));
    return halved.flatten(2).transpose(1, 2).flatten(0, 1);
  }

  VisionConfig config_;
  at::Tensor positional_embedding_;
  std::shared_ptr<Hooked<PatchConvolution>> conv1_;
  std::shared_ptr<Hooked<Norm>> ln_pre_;
  std::shared_ptr<Hooked<StepTransformer>> transformer_;
  std::shared_ptr<Hooked<HalvingConvolution>> vit_downsampler1_, vit_downsampler2_;
};

class StepTower final : public PictureTower {
 public:
  StepTower(const VisionConfig& config, const StepVisionSpec& spec)
      : tower_(std::make_shared<Hooked<StepVisionModel>>(config, spec.first_scale)),
        projector_(std::make_shared<Hooked<Linear>>(Linear::Options{
            .in = 4 * config.hidden_size, .out = config.out_hidden_size, .bias = spec.projector_bias})) {}

  EncoderModules modules() override { return {{"vision_model", tower_}, {"vit_large_projector", projector_}}; }
  VisionFeatures features(const at::Tensor& patches, const VisionPlan& plan) override {
    return {.features = in_given_order(projector_->forward(tower_->forward(patches, plan)), plan), .deepstack = {}};
  }

 private:
  std::shared_ptr<Hooked<StepVisionModel>> tower_;
  std::shared_ptr<Hooked<Linear>> projector_;
};

}  // namespace

EncoderSpecPtr step_vision(VisionLanguageConfig config, StepVisionSpec spec) {
  auto build = [vision = config.vision, spec] { return std::make_shared<StepTower>(vision, spec); };
  return picture_encoder(std::move(config), {.name = "vision_model",
                                             .layers = "transformer.resblocks.{*}",
                                             .casts_inputs = false,  // tables of the rotation
                                             .build = std::move(build)});
}

}  // namespace megashard
