#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/MathConstants.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "models/diffusion/latent_families.h"
#include "models/diffusion/ltx2_parts.h"
#include "parallel/tensor_parallel/tensor_parallel_regions.h"

namespace megashard {
namespace {

constexpr double kLtxOutputEps = 1e-6, kUsualFrameRate = 24;
/// Tokens of a prompt behind its connector, for the count of operations.
constexpr int64_t kLtxTextLength = 1024;

struct Ltx2Config {
  Ltx2Sizes sizes;
  int64_t channels = 128, sound_channels = 128;  ///< of a patch, and of a step of the sound
  int64_t num_layers = 48, text_dim = 3840;
  std::array<int64_t, 3> scale{8, 32, 32};           ///< frames, rows and columns of pixels of a latent
  std::array<int64_t, 3> positions{20, 2048, 2048};  ///< seconds, rows and columns at which turns are the largest
  int64_t sound_scale = 4, sound_seconds = 20, sampling_rate = 16000, hop_length = 160, causal_offset = 1;
  double theta = 10000, gate_factor = 1;  ///< the second: of the timesteps of gates between the streams
  bool turns_in_fp64 = true;
};

/// Middles of steps of `scale`, where the first has fewer: they are causal.
at::Tensor causal_middles(const at::Tensor& steps, int64_t scale, int64_t offset, const auto& in_seconds) {
  const auto bound = [&](const at::Tensor& each) { return in_seconds((each * scale + offset - scale).clamp_min(0)); };
  return (bound(steps) + bound(steps + 1)) / 2;
}

/// e^(i angle), [B, T, H, D / 2]: pairs of `width` channels turn by the axes of `places` [B, T, axes] (1: the largest)
/// in turn; the first pairs, where the axes do not divide them, do not. In fp32, since angles go up to 15,708 and
/// other roundings show.
at::Tensor ltx_turns(const at::Tensor& places, int64_t width, const Ltx2Config& config) {
  const int64_t steps = width / (2 * places.size(2));
  const auto exact = config.turns_in_fp64 ? at::kDouble : at::kFloat;
  const auto powers = at::pow(config.theta, at::linspace(0, 1, steps, places.options().dtype(exact)));
  const auto frequencies = (powers * c10::pi<double> / 2).to(at::kFloat);
  const auto angles = ((places.unsqueeze(-1) * 2 - 1) * frequencies).transpose(-1, -2).flatten(2);
  const auto padded = at::constant_pad_nd(angles, {width / 2 - angles.size(2), 0});
  return at::complex(padded.cos(), padded.sin()).unflatten(-1, {config.sizes.num_heads, -1});
}

/// A layer that takes fp32, also where it is a unit of its own, whose dtype its caller does not see.
class LatentProjection : public Linear {
 public:
  using Linear::Linear;
  at::Tensor forward(const at::Tensor& x) { return Linear::forward(x.to(weight.scalar_type())); }
};

class LTX2VideoTransformer3DModel final : public LatentModel, public SelfInitializing {
 public:
  explicit LTX2VideoTransformer3DModel(const Ltx2Config& config);

  ModelOutput forward(Batch input) override;
  void init_own_weights(const WeightInit& init) override;
  double training_flops(int64_t sequences, int64_t sequence_length) const override;

 protected:
  at::Tensor predict(const Batch& input) override { return predict_both(input).video; }

 private:
  /// One stream's modules.
  struct Ends {
    std::shared_ptr<Hooked<LatentProjection>> proj_in;
    std::shared_ptr<Hooked<Linear>> proj_out;
    std::shared_ptr<Hooked<LatentMlp>> caption;
    std::shared_ptr<Hooked<Ltx2TimeEmbedding>> time, cross, gate;
    at::Tensor table;  // [2, C]
  };
  Ends register_ends(const std::string& prefix, const char* cross, const char* gate, int64_t width, int64_t channels);
  VideoAndSound predict_both(const Batch& input);
  /// `timesteps` [B, S]. Sets `embedding` [B, S, C] for the output.
  Ltx2Stream stream_of(const Ends& ends, const at::Tensor& timesteps, const at::Tensor& text, const at::Tensor& mask,
                       at::Tensor& embedding) const;
  void set_video_turns(const Batch& input, Ltx2Stream& video) const;
  void set_sound_turns(const at::Tensor& sounds, Ltx2Stream& sound) const;
  Ltx2Rows rows_of(const Batch& input) const;
  at::Tensor output(const Ends& ends, const at::Tensor& hidden, const at::Tensor& embedding, const at::Tensor& clean);

  Ltx2Config config_;
  Ends video_, sound_;
  std::vector<std::shared_ptr<Hooked<Ltx2Block>>> blocks_;
};

LTX2VideoTransformer3DModel::LTX2VideoTransformer3DModel(const Ltx2Config& config)
    : LatentModel({.class_name = "LTX2VideoTransformer3DModel",
                   .patches = {.channels = config.channels, .patch = {1, 1, 1}, .text_width = config.text_dim},
                   .num_heads = config.sizes.num_heads,
                   .blocks = {"transformer_blocks.{*}"},
                   .takes_second_text = true,
                   .takes_sounds = true}),
      config_(config) {
  video_ = register_ends("", "av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate", config.sizes.width(),
                         config.channels);
  sound_ = register_ends("audio_", "av_cross_attn_audio_scale_shift", "av_cross_attn_audio_v2a_gate",
                         config.sizes.sound_width(), config.sound_channels);
  const auto list = register_module("transformer_blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    blocks_.push_back(std::make_shared<Hooked<Ltx2Block>>(config.sizes));
    list->push_back(blocks_.back());
  }
}

LTX2VideoTransformer3DModel::Ends LTX2VideoTransformer3DModel::register_ends(const std::string& prefix,
                                                                             const char* cross, const char* gate,
                                                                             int64_t width, int64_t channels) {
  const auto time = [&](const std::string& name, int64_t count) {
    return register_module(name, std::make_shared<Hooked<Ltx2TimeEmbedding>>(width, count));
  };
  Ends ends;
  ends.proj_in =
      register_module(prefix + "proj_in", std::make_shared<Hooked<LatentProjection>>(xavier_linear(channels, width)));
  const LatentMlpSpec caption{.class_name = "PixArtAlphaTextProjection",
                              .in = config_.text_dim,
                              .inner = width,
                              .out = width,
                              .activation = Activation::kGeluTanh};
  ends.caption = register_module(prefix + "caption_projection", std::make_shared<Hooked<LatentMlp>>(caption));
  ends.time = time(prefix + "time_embed", 6);
  ends.cross = time(cross, 4);
  ends.gate = time(gate, 1);
  const Linear::Options out{.in = width, .out = channels, .bias = true, .init_scale = 0};
  ends.proj_out = register_module(prefix + "proj_out", std::make_shared<Hooked<Linear>>(out));
  ends.table = register_parameter(prefix + "scale_shift_table", at::empty({2, width}));
  return ends;
}

void LTX2VideoTransformer3DModel::init_own_weights(const WeightInit& init) {
  for (const auto& table : {video_.table, sound_.table})
    table.normal_(0, 1 / std::sqrt(static_cast<double>(table.size(1))), init.generator);
}

Ltx2Stream LTX2VideoTransformer3DModel::stream_of(const Ends& ends, const at::Tensor& timesteps, const at::Tensor& text,
                                                  const at::Tensor& mask, at::Tensor& embedding) const {
  TORCH_CHECK(text.dim() == 3 && text.size(2) == config_.text_dim, class_name(), " takes text features [B, L, ",
              config_.text_dim, "], got ", text.sizes());
  const auto time = ends.time->forward(timesteps);
  embedding = time.embedding;
  return {.changes = time.changes,
          .cross_changes = ends.cross->forward(timesteps).changes,
          .cross_gate = ends.gate->forward(timesteps * config_.gate_factor).changes,
          .text = ends.caption->forward(text),
          .text_mask = mask,
          .turns = {},
          .cross_turns = {}};
}

void LTX2VideoTransformer3DModel::set_video_turns(const Batch& input, Ltx2Stream& video) const {
  const auto steps = input.at(kPositionIds).to(at::kFloat);
  const auto given = input.find(kFrameRates);
  const auto rates =
      given.defined() ? given.unsqueeze(1) : at::full({steps.size(1), 1}, kUsualFrameRate, steps.options());
  const auto seconds = causal_middles(steps[0], config_.scale[0], config_.causal_offset,
                                      [&](const at::Tensor& frames) { return frames / rates; });
  std::vector<at::Tensor> places{seconds / config_.positions[0]};
  for (size_t i = 1; i < config_.scale.size(); ++i) {
    const auto middles =
        (steps[static_cast<int64_t>(i)] * config_.scale[i] + (steps[static_cast<int64_t>(i)] + 1) * config_.scale[i]) /
        2;
    places.push_back(middles / config_.positions[i]);
  }
  video.turns = ltx_turns(at::stack(places, -1), config_.sizes.width(), config_);
  const int64_t longest = std::max(config_.positions[0], config_.sound_seconds);
  video.cross_turns = ltx_turns((seconds / longest).unsqueeze(-1), config_.sizes.sound_width(), config_);
}

void LTX2VideoTransformer3DModel::set_sound_turns(const at::Tensor& sounds, Ltx2Stream& sound) const {
  const auto steps = at::arange(sounds.size(1), sounds.options().dtype(at::kFloat));
  const auto in_seconds = [&](const at::Tensor& mel) { return mel * config_.hop_length / config_.sampling_rate; };
  const auto seconds = causal_middles(steps, config_.sound_scale, config_.causal_offset, in_seconds);
  const auto turns = [&](int64_t longest) {
    const auto places = (seconds / longest).view({1, -1, 1});
    return ltx_turns(places, config_.sizes.sound_width(), config_);
  };
  sound.turns = turns(config_.sound_seconds);
  sound.cross_turns = turns(std::max(config_.positions[0], config_.sound_seconds));
}

Ltx2Rows LTX2VideoTransformer3DModel::rows_of(const Batch& input) const {
  Ltx2Rows rows{.clean = input.find(kCleanPatches),
                .key_mask = key_mask_of(input),
                .gathered_mask = input.token_mask(),
                .sequence = input.sequence};
  if (!input.find(kSounds).defined() || input.sequence.is_whole()) return rows;
  const int64_t ranks = input.sequence.group->size();
  TORCH_CHECK(input.sequence.length % ranks == 0, "a video of ", input.sequence.length, " patches with a sound on ",
              ranks, " ranks needs a multiple of ", ranks,
              " patches: choose another size, or fewer ranks (--context-parallel-size)");
  if (rows.gathered_mask.defined()) {
    const auto mask = rows.gathered_mask.to(at::kFloat).unsqueeze(-1).contiguous();
    rows.gathered_mask = gather_from_sequence_parallel_region(mask, input.sequence.group).squeeze(-1).to(at::kBool);
  }
  return rows;
}

at::Tensor LTX2VideoTransformer3DModel::output(const Ends& ends, const at::Tensor& hidden, const at::Tensor& embedding,
                                               const at::Tensor& clean) {
  const auto changes = (ends.table.to(at::kFloat) + embedding.to(at::kFloat).unsqueeze(2)).unbind(2);
  return ends.proj_out->forward(modulated_norm(hidden, {changes[1] + 1, changes[0]}, clean, kLtxOutputEps));
}

VideoAndSound LTX2VideoTransformer3DModel::predict_both(const Batch& input) {
  const auto sounds = input.find(kSounds);
  const auto& text = input.at(kTextFeatures);
  const auto text_mask = input.find(kTextMask);
  auto timesteps = input.at(kTimesteps).unsqueeze(1);
  const auto sound_timesteps = timesteps;
  if (input.find(kCleanPatches).defined()) timesteps = at::cat({timesteps, at::zeros_like(timesteps)}, 1);
  at::Tensor embedding, sound_embedding;
  Ltx2Pass pass{.video = stream_of(video_, timesteps, text, text_mask, embedding), .sound = {}, .rows = rows_of(input)};
  set_video_turns(input, pass.video);
  VideoAndSound hidden{.video = video_.proj_in->forward(with_conditions(input, config_.channels)), .sound = {}};
  if (sounds.defined()) {
    TORCH_CHECK(sounds.dim() == 3 && sounds.size(2) == config_.sound_channels, class_name(), " takes sounds [B, S, ",
                config_.sound_channels, "], got ", sounds.sizes());
    const auto own = input.find(kSecondText);
    pass.sound = stream_of(sound_, sound_timesteps, own.defined() ? own : text,
                           own.defined() ? input.find(kSecondTextMask) : text_mask, sound_embedding);
    set_sound_turns(sounds, pass.sound);
    hidden.sound = sound_.proj_in->forward(sounds);
  }
  for (const auto& block : blocks_) hidden = block->forward(hidden, pass);
  hidden.video = output(video_, hidden.video, embedding, pass.rows.clean);
  if (hidden.sound.defined()) hidden.sound = output(sound_, hidden.sound, sound_embedding, {});
  return hidden;
}

/// The sound's error is added as a mean of its own, as in LTX-2's training.
ModelOutput LTX2VideoTransformer3DModel::forward(Batch input) {
  check_input(input);
  const auto found = predict_both(input);
  auto result = output_of(input, found.video);
  const auto targets = input.find(kSoundTargets);
  if (!found.sound.defined() || !input.find(kTargets).defined()) return result;
  const auto error = (found.sound.to(at::kFloat) - targets).square().mean();
  result.aux.push_back({.name = "sound_loss", .value = error, .metric = error.detach()});
  return result;
}

/// Products of the video alone, as Megatron counts.
double LTX2VideoTransformer3DModel::training_flops(int64_t sequences, int64_t sequence_length) const {
  const auto width = static_cast<double>(config_.sizes.width()), patches = static_cast<double>(sequence_length);
  const auto layers = static_cast<double>(config_.num_layers), text_dim = static_cast<double>(config_.text_dim);
  const double of_patch = layers * (14 * width * width + 2 * width * (patches + kLtxTextLength)) +
                          2 * width * static_cast<double>(config_.channels);
  const double text = kLtxTextLength * width * (layers * 2 * width + text_dim + width);
  const double time = 3 * width * (256 + width) + 11 * width * width;
  return 6 * static_cast<double>(sequences) * (patches * of_patch + text + time);
}

/// Throws for what only later models have (LTX-2.3 and 2.5), and for sizes that cannot be computed.
void require_computable(const HfConfig& config, const Ltx2Config& ltx) {
  for (const char* key : {"gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod",
                          "norm_elementwise_affine", "use_keyframes_abs_pos_embedding"})
    config.require_computed(!config.get(key, false), key, " is true, which is not supported: train LTX-2 itself");
  for (const char* key : {"attention_bias", "attention_out_bias", "use_prompt_embeddings", "ff_bias", "audio_ff_bias",
                          "use_prompt_adaln_single"})
    config.require_computed(config.get(key, true), key, " is false, which is not supported: train LTX-2 itself");
  for (const char* key : {"patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"})
    config.require_computed(config.get(key, int64_t{1}) == 1, key, " is not 1, which is not supported");
  const auto norm = config.get("qk_norm", std::string("rms_norm_across_heads"));
  const auto activation = config.get("activation_fn", std::string("gelu-approximate"));
  config.require_computed(norm == "rms_norm_across_heads", "qk_norm is ", norm, "; only rms_norm_across_heads is ",
                          "supported");
  config.require_computed(activation == "gelu-approximate", "activation_fn is ", activation, "; only ",
                          "gelu-approximate is supported");
  for (const auto& [out, in] :
       {std::pair("out_channels", ltx.channels), std::pair("audio_out_channels", ltx.sound_channels)})
    config.require_computed(config.get_or_null(out, in) == in, out, " must be the number of channels of the input, ",
                            in);
  const auto& sizes = ltx.sizes;
  const auto same = [&](const char* key, int64_t initial, int64_t wanted) {
    const auto given = config.get(key, initial);
    TORCH_CHECK(given == wanted, config.path(), ": ", key, " is ", given, ", and must be ", wanted,
                ", as the heads make it");
  };
  same("audio_num_attention_heads", 32, sizes.num_heads);
  same("cross_attention_dim", 4096, sizes.width());
  same("audio_cross_attention_dim", 2048, sizes.sound_width());
}

}  // namespace

std::shared_ptr<LatentModel> make_ltx2(const HfConfig& config) {
  require_known_keys(config, {"in_channels",
                              "out_channels",
                              "patch_size",
                              "patch_size_t",
                              "num_attention_heads",
                              "attention_head_dim",
                              "cross_attention_dim",
                              "vae_scale_factors",
                              "pos_embed_max_pos",
                              "base_height",
                              "base_width",
                              "gated_attn",
                              "cross_attn_mod",
                              "audio_in_channels",
                              "audio_out_channels",
                              "audio_patch_size",
                              "audio_patch_size_t",
                              "audio_num_attention_heads",
                              "audio_attention_head_dim",
                              "audio_cross_attention_dim",
                              "audio_scale_factor",
                              "audio_pos_embed_max_pos",
                              "audio_sampling_rate",
                              "audio_hop_length",
                              "audio_gated_attn",
                              "audio_cross_attn_mod",
                              "num_layers",
                              "activation_fn",
                              "qk_norm",
                              "norm_elementwise_affine",
                              "norm_eps",
                              "caption_channels",
                              "attention_bias",
                              "attention_out_bias",
                              "rope_theta",
                              "rope_double_precision",
                              "causal_offset",
                              "timestep_scale_multiplier",
                              "cross_attn_timestep_scale_multiplier",
                              "rope_type",
                              "use_prompt_embeddings",
                              "perturbed_attn",
                              "ff_bias",
                              "audio_ff_bias",
                              "use_prompt_adaln_single",
                              "use_keyframes_abs_pos_embedding"});
  Ltx2Config ltx;
  ltx.sizes.num_heads = config.get("num_attention_heads", ltx.sizes.num_heads);
  ltx.sizes.head_dim = config.get("attention_head_dim", ltx.sizes.head_dim);
  ltx.sizes.sound_head_dim = config.get("audio_attention_head_dim", ltx.sizes.sound_head_dim);
  ltx.sizes.eps = config.get("norm_eps", ltx.sizes.eps);
  ltx.channels = config.get("in_channels", ltx.channels);
  ltx.sound_channels = config.get("audio_in_channels", ltx.sound_channels);
  ltx.num_layers = config.get("num_layers", ltx.num_layers);
  ltx.text_dim = config.get("caption_channels", ltx.text_dim);
  const auto scale = config.get("vae_scale_factors", std::vector<int64_t>(ltx.scale.begin(), ltx.scale.end()));
  TORCH_CHECK(scale.size() == 3, config.path(), ": vae_scale_factors has ", scale.size(), " numbers, not 3");
  std::ranges::copy(scale, ltx.scale.begin());
  ltx.positions = {config.get("pos_embed_max_pos", ltx.positions[0]), config.get("base_height", ltx.positions[1]),
                   config.get("base_width", ltx.positions[2])};
  ltx.sound_scale = config.get("audio_scale_factor", ltx.sound_scale);
  ltx.sound_seconds = config.get("audio_pos_embed_max_pos", ltx.sound_seconds);
  ltx.sampling_rate = config.get("audio_sampling_rate", ltx.sampling_rate);
  ltx.hop_length = config.get("audio_hop_length", ltx.hop_length);
  ltx.causal_offset = config.get("causal_offset", ltx.causal_offset);
  ltx.theta = config.get("rope_theta", ltx.theta);
  ltx.turns_in_fp64 = config.get("rope_double_precision", ltx.turns_in_fp64);
  const auto multiplier = config.get("timestep_scale_multiplier", 1000.0);
  config.require_computed(multiplier == 1000, "timestep_scale_multiplier is ", multiplier, "; only 1000 is supported");
  ltx.gate_factor = config.get("cross_attn_timestep_scale_multiplier", 1000.0) / multiplier;
  const auto turns = config.get("rope_type", std::string("interleaved"));
  config.require_computed(turns == "interleaved" || turns == "split", "rope_type is ", turns,
                          "; only interleaved and split are supported");
  ltx.sizes.turns = turns == "split" ? LtxTurns::kHalves : LtxTurns::kNeighbours;
  require_computable(config, ltx);
  return std::make_shared<LTX2VideoTransformer3DModel>(ltx);
}

}  // namespace megashard
