// Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, an MLP, or experts.
#include <array>
#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"
#include "models/layers/mamba2.h"

namespace megashard {
namespace {

constexpr const char* kMamba = "linear_attention";

/// The layers' kinds, from layers_block_type or from the letters of hybrid_override_pattern.
std::vector<std::string> read_kinds(const HfConfig& config) {
  static constexpr std::array<std::array<std::string_view, 3>, 4> kKinds{
      {{"M", "mamba", kMamba}, {"*", "attention", "full_attention"}, {"-", "", "mlp"}, {"E", "", "moe"}}};
  const auto kind = [&](const std::string& name) {
    for (const auto& names : kKinds) {
      if (std::ranges::count(names, name) > 0) return std::string(names.back());
    }
    TORCH_CHECK(false, config.path(), ": layers_block_type (or hybrid_override_pattern) has ", name,
                ", which is not supported; known are full_attention (*), linear_attention (M), mlp (-) and moe (E)");
  };
  std::vector<std::string> drawn;
  for (const char letter : config.get_or_null<std::string>("hybrid_override_pattern", ""))
    drawn.push_back(kind({letter}));
  auto kinds = config.get_either("layers_block_type", "layer_types", drawn);
  for (auto& each : kinds) each = kind(each);
  TORCH_CHECK(drawn.empty() || kinds == drawn, config.path(),
              ": layers_block_type and hybrid_override_pattern differ: keep the one that is right");
  return kinds;
}

DecoderConfig read_nemotron_h(const HfConfig& config) {
  const auto kinds = read_kinds(config);
  auto network = read_decoder(config, {.names = class_names("NemotronH"),
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .num_layers = std::ssize(kinds),
                                       .max_positions = 4096,
                                       .intermediate_size = 21504,
                                       .activation_key = "mlp_hidden_act",
                                       .activation = "relu2"});
  TORCH_CHECK(network.num_layers == std::ssize(kinds), config.path(), ": num_hidden_layers must be ", kinds.size());
  config.require_computed(!network.tie_word_embeddings, "tie_word_embeddings must be false, as in transformers' class");
  network.names.layer = "NemotronHBlock";
  network.norm_eps = config.get("layer_norm_epsilon", 1e-5);
  network.norm_in_fp32 = true;
  network.positions = PositionKind::kNone;
  network.pad_token_id = std::nullopt;
  network.gated_mlp = false;
  network.mlp_bias = config.get("mlp_bias", false);
  network.moe =
      read_grouped_moe(config, {.num_experts = 8, .experts_per_token = 2, .intermediate_size = 7688, .dense_layers = 0},
                       network.num_layers);
  for (const char* key : {"n_group", "topk_group"}) config.get<int64_t>(key, 1);  // null is an error here
  network.moe.shared.intermediate_size = read_positive(config, "moe_shared_expert_intermediate_size", 7688);
  network.moe.latent_size = config.get_or_null<int64_t>("moe_latent_size", 0);
  TORCH_CHECK(network.moe.latent_size >= 0, config.path(), ": moe_latent_size must be positive");
  network.moe.dense_layers =
      layers_where(network.num_layers, [&](int64_t layer) { return kinds[static_cast<size_t>(layer)] != "moe"; });
  network.names.moe = "NemotronHMoE";
  network.names.router = "NemotronHTopkRouter";
  return network;
}

PartSpecPtr mamba_of(const HfConfig& config, const DecoderConfig& network) {
  Mamba2Spec spec{.class_name = "NemotronHMamba2Mixer",
                  .hidden_size = network.hidden_size,
                  .heads = read_positive(config, "mamba_num_heads", 128),
                  .groups = config.get_either<int64_t>("mamba_n_groups", "n_groups", 8),
                  .head_dim = read_positive(config, "mamba_head_dim", 64),
                  .state_dim = read_positive(config, "ssm_state_size", 128),
                  .conv_width = config.get_either<int64_t>("mamba_d_conv", "conv_kernel", 4),
                  .conv_bias = config.get_either("mamba_conv_bias", "use_conv_bias", true),
                  .bias = config.get("use_bias", false),
                  .activation = read_activation(config, "mamba_hidden_act", "silu"),
                  .first_step = config.get_either("mamba_dt_min", "time_step_min", 0.001),
                  .last_step = config.get_either("mamba_dt_max", "time_step_max", 0.1),
                  .step_floor = config.get_either("mamba_dt_init_floor", "time_step_floor", 1e-4)};
  TORCH_CHECK(spec.groups > 0 && spec.heads % spec.groups == 0 && spec.conv_width > 0, config.path(),
              ": mamba_num_heads ", spec.heads, " must be a multiple of n_groups, and conv_kernel positive");
  TORCH_CHECK(spec.first_step > 0 && spec.last_step >= spec.first_step && spec.step_floor > 0, config.path(),
              ": time_step_min, time_step_max and time_step_floor must be positive, in this order of size");
  spec.norm = {.class_name = "NemotronHRMSNormGated",
               .width = spec.width(),
               .eps = network.norm_eps,
               .in_fp32 = true,
               .groups = spec.groups};
  // A standard deviation of 1 / sqrt(3 inputs layers) replaces the network's.
  if (config.get("rescale_prenorm_residual", true) && network.init_std > 0)
    spec.output_init_scale =
        1 / (std::sqrt(3.0 * static_cast<double>(spec.width() * network.num_layers)) * network.init_std);
  return mamba2_part(std::move(spec));
}

/// A single branch, called mixer.
LayerSpec nemotron_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  const auto kind = read_kinds(config)[static_cast<size_t>(index)];
  auto mixer = layer.branches[kind == kMamba || kind == "full_attention" ? 0 : 1];
  if (kind == kMamba) mixer.part = mamba_of(config, network);
  mixer.name = "mixer";
  mixer.before->name = "norm";
  layer.branches = {std::move(mixer)};
  return layer;
}

const RegisterFamily kNemotronH({.model_type = "nemotron_h",
                                 .architecture = "NemotronHForCausalLM",
                                 .read = read_nemotron_h,
                                 .layer = nemotron_layer,
                                 .weight_files = {.renamings = {{"model.embed_tokens.", "backbone.embeddings."},
                                                                {"model.norm.", "backbone.norm_f."},
                                                                {"model.layers.", "backbone.layers."}},
                                                  .prediction_layers = WeightFiles::PredictionLayers::kOtherMtp}});

}  // namespace
}  // namespace megashard
