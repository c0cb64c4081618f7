#include "models/network/network.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "models/layers/attention.h"
#include "models/layers/latent_attention.h"
#include "models/layers/mlp.h"
#include "models/moe/moe.h"
#include "models/network/prediction_files.h"

namespace megashard {
namespace {

NormSpec norm_of(const DecoderConfig& config, int64_t width) {
  return {.class_name = config.names.norm,
          .width = width,
          .kind = config.norm,
          .eps = config.norm_eps,
          .zero_centered = config.zero_centered_norm,
          .in_fp32 = config.norm_in_fp32,
          .bias = config.norm_bias};
}

/// Index of the layer's tables in Network::rotaries.
std::optional<size_t> rotary_index(const DecoderConfig& config, int64_t layer) {
  if (!config.is_rotated(layer)) return std::nullopt;
  return config.sliding_rotary && config.is_sliding(layer) ? 1 : 0;
}

/// "{*}" if these are all layers.
std::string pattern_of(const std::vector<int64_t>& layers, size_t all) {
  return layers.size() == all ? "{*}" : "{" + c10::Join(",", layers) + "}";
}

/// 1 / sqrt of a key's channels, enlarged for positions that are stretched by YaRN's mscale_all_dim.
double latent_scale(const RotaryConfig& rotary, int64_t channels) {
  const double mscale = yarn_mscale(rotary.factor, rotary.mscale_all_dim);
  return mscale * mscale / std::sqrt(static_cast<double>(channels));
}

PartSpecPtr latent_attention_of(const DecoderConfig& config, int64_t index) {
  const auto& latent = *config.latent;
  LatentAttentionSpec spec{.class_name = config.names.attention,
                           .hidden_size = config.hidden_size,
                           .num_heads = config.num_heads,
                           .query_rank = latent.query_rank,
                           .key_rank = latent.key_rank,
                           .plain_dim = latent.plain_dim,
                           .rotated_dim = config.head_dim,
                           .value_dim = latent.value_dim,
                           .latent_bias = config.qkv_bias,
                           .out_bias = config.attention_out_bias,
                           .rotary = rotary_index(config, index),
                           .neighbours = config.rotary.interleaved,
                           .query_factors = config.has_query_factors(index),
                           .dropout = config.attention_dropout,
                           .output_init_scale = config.output_init_scale};
  if (latent.norm_eps) {
    spec.norm = hidden_norm(config);
    spec.norm->eps = *latent.norm_eps;
  }
  spec.scale = latent_scale(config.rotary, spec.key_dim());
  return latent_attention_part(std::move(spec));
}

}  // namespace

NormSpec hidden_norm(const DecoderConfig& config) { return norm_of(config, config.hidden_size); }

PartSpecPtr attention_of(const DecoderConfig& config, int64_t index) {
  if (config.latent) return latent_attention_of(config, index);
  const bool is_global = !config.is_sliding(index);
  const HeadSizes heads =
      is_global && config.global_heads ? *config.global_heads : HeadSizes{config.head_dim, config.num_kv_heads};
  AttentionSpec spec{.class_name = config.names.attention,
                     .hidden_size = config.hidden_size,
                     .num_heads = config.num_heads,
                     .num_kv_heads = heads.num_kv_heads,
                     .head_dim = heads.head_dim,
                     .qkv_bias = config.qkv_bias,
                     .out_bias = config.attention_out_bias,
                     .rotary = rotary_index(config, index),
                     .rotary_interleaved = config.rotary.interleaved,
                     .sinks = config.attention_sinks,
                     .window = config.is_sliding(index) ? config.sliding_window : 0,
                     .scale = config.attention_scale,
                     .dropout = config.attention_dropout,
                     .output_init_scale = config.output_init_scale};
  spec.output_gate = config.attention_gate;
  spec.norms_all_heads = config.qk_norm_of_all_heads;
  if (config.qk_norm || spec.norms_all_heads) {
    spec.head_norm = norm_of(config, heads.head_dim);
    spec.head_norm->weight = config.qk_norm_weight;
  }
  spec.norms_rotated = config.qk_norm_behind_rotation;
  spec.chunk = config.is_chunked(index) ? config.attention_chunk : 0;
  spec.softcap = config.attention_softcap;
  spec.query_factors = config.has_query_factors(index);
  spec.values_are_keys = is_global && config.values_are_keys;
  spec.norms_values = config.v_norm;
  using Sharing = AttentionSpec::Sharing;
  spec.sharing = config.takes_keys(index) ? Sharing::kTake : config.gives_keys(index) ? Sharing::kGive : Sharing::kNone;
  spec.shared_place = is_global ? 0 : 1;
  return attention_part(std::move(spec));
}

MlpSpec mlp_of(const DecoderConfig& config, int64_t intermediate_size) {
  return {.class_name = config.names.mlp,
          .hidden_size = config.hidden_size,
          .intermediate_size = intermediate_size,
          .activation = config.activation,
          .gated = config.gated_mlp,
          .bias = config.mlp_bias,
          .output_init_scale = config.output_init_scale};
}

namespace {

std::optional<SharedExpertSpec> shared_expert_of(const DecoderConfig& config) {
  const auto& shared = config.moe.shared;
  if (shared.intermediate_size == 0) return std::nullopt;
  return SharedExpertSpec{shared.name, mlp_of(config, shared.intermediate_size), shared.gated};
}

}  // namespace

MoeSpec moe_of(const DecoderConfig& config, RouterSpecPtr router) {
  auto expert = mlp_of(config, config.moe.intermediate_size);
  expert.bias = config.moe.bias;
  if (config.moe.latent_size > 0) expert.hidden_size = config.moe.latent_size;
  expert.clamped = config.moe.clamped;
  return {.class_name = config.names.moe,
          .experts_class = config.names.experts,
          .hidden_size = config.hidden_size,
          .moe = config.moe,
          .expert = std::move(expert),
          .latent_bias = config.mlp_bias,
          .router = router ? std::move(router) : top_k_router(config.names.router, config.moe.router),
          .shared = shared_expert_of(config)};
}

PartSpecPtr experts_of(const DecoderConfig& config, RouterSpecPtr router) {
  return experts_part(moe_of(config, std::move(router)));
}

PartSpecPtr mlp_or_experts_of(const DecoderConfig& config, int64_t index) {
  return config.moe.is_sparse(index) ? experts_of(config) : mlp_part(mlp_of(config, config.intermediate_size));
}

LayerSpec decoder_layer(const DecoderConfig& config, int64_t index) {
  const auto norm = [&](const char* name) { return NamedNorm{name, hidden_norm(config)}; };
  Branch attention{.name = "self_attn", .part = attention_of(config, index), .before = norm("input_layernorm")};
  Branch mlp{.name = "mlp", .part = mlp_or_experts_of(config, index)};
  if (config.sandwich_norms || config.post_norms) {
    attention.after = norm("post_attention_layernorm");
    mlp.before = norm("pre_feedforward_layernorm");
    mlp.after = norm("post_feedforward_layernorm");
  } else {
    mlp.before = norm("post_attention_layernorm");
  }
  if (config.post_norms) {
    attention.before.reset();
    mlp.before.reset();
  }
  if (config.parallel_branches) {
    mlp.before.reset();
    mlp.parallel = true;
  }
  return {.class_name = config.names.layer,
          .branches = {std::move(attention), std::move(mlp)},
          .dropout = config.hidden_dropout,
          .scale = config.residual_scale,
          .scalar = config.layer_scalars};
}

Network decoder_network(DecoderConfig config, const DescribeLayer& layer) {
  Network network{.norm = hidden_norm(config)};
  if (config.positions == PositionKind::kRotary) network.rotaries.push_back(config.rotary);
  if (config.sliding_rotary) network.rotaries.push_back(*config.sliding_rotary);
  for (int64_t i = 0; i < config.num_layers; ++i) network.layers.push_back(layer(config, i));
  for (int64_t k = 0; k < config.prediction.depth; ++k) network.prediction_layers.push_back(network.layers.back());
  network.config = std::move(config);
  return network;
}

namespace {

/// A layer, and where it lies.
struct PlacedLayer {
  const LayerSpec& spec;
  std::string path;  ///< of its branches, with its dot
};

/// Layers of one list, and the path of the list.
struct LayerList {
  const std::vector<LayerSpec>& layers;
  std::string path;
  std::string inside;  ///< path from an entry to its branches, with a dot; empty: the entry has them
};

std::array<LayerList, 2> layer_lists(const Network& network, const std::string& stack) {
  return {{{network.layers, stack + "layers.", ""},
           {network.prediction_layers, stack + kPredictionLayers + ".", std::string(kTransformerLayer) + "."}}};
}

std::vector<PlacedLayer> placed_layers(const Network& network, const std::string& stack) {
  std::vector<PlacedLayer> placed;
  for (const auto& [layers, path, inside] : layer_lists(network, stack)) {
    for (size_t i = 0; i < layers.size(); ++i) placed.push_back({layers[i], path + std::to_string(i) + "." + inside});
  }
  return placed;
}

}  // namespace

void for_each_part(const Network& network, const std::function<void(const PartSpec&)>& visit) {
  for (const auto* layers : {&network.layers, &network.prediction_layers}) {
    for (const auto& layer : *layers) {
      for (const auto& branch : layer.branches) visit(*branch.part);
    }
  }
}

bool keeps_fp32(const Network& network, const std::string& stack, const std::string& name) {
  for (const auto& layer : placed_layers(network, stack)) {
    if (!name.starts_with(layer.path)) continue;
    for (const auto& branch : layer.spec.branches) {
      for (const auto& each : branch.part->names_in_fp32()) {
        if (name == layer.path + branch.name + "." + each) return true;
      }
    }
  }
  return false;
}

WeightMap weight_map(const Network& network, const std::string& stack, const WeightFiles& files) {
  WeightMap map{.renamings = prediction_renamings(network.config, stack, files)};
  const auto& of_layers = network.layers.front().renamings;
  map.renamings.insert(map.renamings.end(), of_layers.begin(), of_layers.end());
  map.renamings.insert(map.renamings.end(), files.renamings.begin(), files.renamings.end());
  for (const auto& layer : placed_layers(network, stack)) {
    for (const auto& branch : layer.spec.branches) {
      auto groups = branch.part->weight_forms(layer.path + branch.name + ".", files);
      std::ranges::move(groups, std::back_inserter(map.groups));
    }
  }
  return map;
}

double training_flops(const Network& network, int64_t sequences, int64_t sequence_length) {
  const auto& config = network.config;
  const auto hidden = static_cast<double>(config.hidden_size), depth = static_cast<double>(config.prediction.depth);
  const double outputs = config.score_head ? 1 : static_cast<double>(config.vocab_size);
  double token = 6 * hidden * outputs * (1 + depth);
  token += 6 * depth * (3 * hidden + 2 * hidden * hidden);  // norms and eh_proj
  for_each_part(network, [&](const PartSpec& part) { token += part.training_flops(sequence_length); });
  return token * static_cast<double>(sequences) * static_cast<double>(sequence_length);
}

namespace {

void add_patterns(const LayerList& list, const std::string& part, std::vector<std::string>& patterns) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> found;  // path in a layer, and the layers that have it
  const auto add = [&](const std::string& path, int64_t layer) {
    const auto known = std::find_if(found.begin(), found.end(), [&](const auto& each) { return each.first == path; });
    if (known == found.end()) {
      found.emplace_back(path, std::vector{layer});
    } else {
      known->second.push_back(layer);
    }
  };
  for (size_t i = 0; i < list.layers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    for (const auto& branch : list.layers[i].branches) {
      for (const auto& path : branch.part->paths_of(part)) add(branch.name + (path.empty() ? "" : "." + path), index);
      if (branch.before && branch.part->norm_before() == part) add(branch.before->name, index);
    }
  }
  for (const auto& [path, of_layers] : found)
    patterns.push_back(list.path + pattern_of(of_layers, list.layers.size()) + "." + list.inside + path);
}

}  // namespace

std::vector<std::string> patterns_of_part(const Network& network, const std::string& stack, const std::string& part) {
  std::vector<std::string> patterns;
  for (const auto& list : layer_lists(network, stack)) {
    if (list.layers.empty()) continue;
    if (part == "layer") {
      patterns.push_back(list.path + "{*}");
    } else {
      add_patterns(list, part, patterns);
    }
  }
  return patterns;
}

}  // namespace megashard
