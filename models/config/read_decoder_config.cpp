#include "models/config/read_decoder_config.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "models/config/read_rotary.h"

namespace megashard {
namespace {

void check_sections(const HfConfig& config, const DecoderConfig& network) {
  const auto& rotary = network.rotary;
  if (rotary.mrope_section.empty() || rotary.mrope_interleaved) return;
  const auto sum = std::accumulate(rotary.mrope_section.begin(), rotary.mrope_section.end(), int64_t{0});
  const auto turned = static_cast<int64_t>(static_cast<double>(network.head_dim) * rotary.fraction);
  TORCH_CHECK(2 * sum == turned, config.path(), ": mrope_section ", c10::IntArrayRef(rotary.mrope_section),
              " must add up to half of the head dimension ", turned, rotary.fraction < 1 ? " that turns" : "");
}

/// As torch's Embedding: -1 is the last row.
std::optional<int64_t> read_padding(const HfConfig& config, int64_t vocab_size, std::optional<int64_t> fallback) {
  if (config.is_null("pad_token_id") || (!fallback && config.find("pad_token_id") == nullptr)) return std::nullopt;
  const auto pad = config.get<int64_t>("pad_token_id", fallback.value_or(0));
  const bool fits = -vocab_size <= pad && pad < vocab_size;
  config.require_computed(fits, "pad_token_id ", pad, " is no token of the vocabulary, of ", vocab_size,
                          "; write null where no token is padding");
  if (!fits) return std::nullopt;
  return pad < 0 ? pad + vocab_size : pad;
}

}  // namespace

ModuleNames class_names(const std::string& prefix) {
  return {.norm = prefix + "RMSNorm",
          .rotary = prefix + "RotaryEmbedding",
          .attention = prefix + "Attention",
          .mlp = prefix + "MLP",
          .layer = prefix + "DecoderLayer",
          .decoder = prefix + "Model",
          .model = prefix + "ForCausalLM",
          .moe = prefix + "SparseMoeBlock",
          .experts = prefix + "Experts",
          .router = prefix + "TopKRouter"};
}

int64_t read_positive(const HfConfig& config, const char* key, int64_t fallback) {
  const auto number = config.get(key, fallback);
  TORCH_CHECK(number > 0, config.path(), ": ", key, " ", number, " must be positive");
  return number;
}

Activation read_activation(const HfConfig& config, const char* key, const std::string& fallback) {
  static const std::map<std::string, Activation> known = {{"silu", Activation::kSilu},
                                                          {"swish", Activation::kSilu},
                                                          {"gelu", Activation::kGelu},
                                                          {"gelu_python", Activation::kGelu},
                                                          {"gelu_new", Activation::kGeluTanh},
                                                          {"gelu_fast", Activation::kGeluTanh},
                                                          {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                          {"relu", Activation::kRelu},
                                                          {"relu2", Activation::kSquaredRelu},
                                                          {"quick_gelu", Activation::kQuickGelu}};
  const auto name = config.get<std::string>(key, fallback);
  const auto found = known.find(name);
  config.require_computed(
      found != known.end(), key, " ", name,
      " is not supported; known are silu, gelu, gelu_new, gelu_pytorch_tanh, quick_gelu, relu and relu2");
  return found == known.end() ? Activation::kSilu : found->second;
}

std::vector<int64_t> layers_where(int64_t num_layers, const std::function<bool(int64_t layer)>& selected) {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    if (selected(layer)) layers.push_back(layer);
  }
  return layers;
}

int64_t read_sliding_window(const HfConfig& config, int64_t fallback) {
  if (config.is_null("sliding_window")) return 0;
  const auto window = config.get("sliding_window", fallback);
  const bool is_absent = config.find("sliding_window") == nullptr;
  config.require_computed(window > 0 || is_absent, "sliding_window ", window,
                          " must be positive, or null for full attention");
  return window;
}

std::vector<int64_t> read_unrotated_layers(const HfConfig& config, int64_t num_layers) {
  const auto interval = read_positive(config, "no_rope_layer_interval", 4);
  const auto rotates = config.get_or_null("no_rope_layers", std::vector<int64_t>{});
  TORCH_CHECK(config.find("no_rope_layers") == nullptr || std::ssize(rotates) == num_layers, config.path(),
              ": no_rope_layers has ", rotates.size(), " entries for num_hidden_layers ", num_layers);
  return layers_where(num_layers, [&](int64_t layer) {
    return rotates.empty() ? (layer + 1) % interval == 0 : rotates[static_cast<size_t>(layer)] == 0;
  });
}

std::vector<int64_t> read_sliding_layers(const HfConfig& config, const DecoderConfig& network,
                                         const std::function<bool(int64_t layer)>& slides) {
  const int64_t num_layers = network.num_layers;
  const auto types = config.get_or_null("layer_types", std::vector<std::string>{});
  config.require_computed(config.find("layer_types") == nullptr || static_cast<int64_t>(types.size()) == num_layers,
                          "layer_types has ", types.size(), " entries for num_hidden_layers ", num_layers);
  for (const auto& type : types) {
    config.require_computed(type == "sliding_attention" || type == "full_attention", "layer_types has ", type,
                            ", which is not supported; known are full_attention and sliding_attention");
  }
  const auto layers = layers_where(num_layers, [&](int64_t layer) {
    const auto index = static_cast<size_t>(layer);
    return index < types.size() ? types[index] == "sliding_attention" : slides(layer);
  });
  config.require_computed(layers.empty() || network.sliding_window > 0,
                          "layers slide (layer_types says so, or the "
                          "family), and there is no window: write sliding_window, with use_sliding_window true where "
                          "the family has that, or full_attention into layer_types");
  return layers;
}

void require_no_windows(const HfConfig& config, const DecoderConfig& network) {
  read_sliding_layers(config, network, [](int64_t /*layer*/) { return false; });
}

void slide_all_or_no_layers(const HfConfig& config, DecoderConfig& network) {
  const int64_t sliding = network.sliding_window > 0 ? network.num_layers : 0;
  network.sliding_layers = read_sliding_layers(config, network, [sliding](int64_t) { return sliding > 0; });
  config.require_computed(std::ssize(network.sliding_layers) == sliding, "layer_types says that ",
                          network.sliding_layers.size(),
                          " layers slide, and sliding_window (with use_sliding_window, where the family has it) that ",
                          sliding, " do: this family has a window in all layers or in none; take layer_types out");
}

void read_window_of_all_layers(const HfConfig& config, DecoderConfig& network) {
  network.sliding_window = read_sliding_window(config, 4096);
  const auto all = [&](int64_t) { return network.sliding_window > 0; };
  network.sliding_layers = read_sliding_layers(config, network, all);
}

void read_optional_windows(const HfConfig& config, DecoderConfig& network) {
  const auto first = config.get<int64_t>("max_window_layers", 28);
  const bool uses = config.get("use_sliding_window", false);
  network.sliding_window = uses ? read_sliding_window(config, 4096) : 0;
  network.sliding_layers =
      read_sliding_layers(config, network, [&](int64_t layer) { return network.sliding_window > 0 && layer >= first; });
}

HeadSizes read_global_heads(const HfConfig& config, const DecoderConfig& network, HeadSizes published) {
  if (const auto* layers = config.find("per_layer_config"); layers != nullptr) {
    std::optional<HeadSizes> found;
    std::vector<int64_t> listed;
    bool fits = layers->is_object();
    for (const auto& item : layers->items()) {
      const auto& name = item.key();
      const auto& keys = item.value();
      const auto size = [&](const char* key, int64_t other) {
        return keys.contains(key) ? config.need<int64_t>(keys, key) : other;
      };
      const HeadSizes sizes{size("head_dim", network.head_dim), size("num_key_value_heads", network.num_kv_heads)};
      fits = fits && keys.size() == keys.count("head_dim") + keys.count("num_key_value_heads") &&
             found.value_or(sizes) == sizes;
      found = sizes;
      std::from_chars(name.data(), name.data() + name.size(), listed.emplace_back(-1));
    }
    std::ranges::sort(listed);
    const auto global = layers_where(network.num_layers, [&](int64_t layer) { return !network.is_sliding(layer); });
    TORCH_CHECK(fits && listed == global, config.path(),
                ": per_layer_config must give each layer that layer_types calls full_attention the same head_dim and "
                "num_key_value_heads, and nothing else, got ",
                layers->dump());
    published = found.value_or(published);
  }
  TORCH_CHECK(published.head_dim > 0 && published.num_kv_heads > 0 && network.num_heads % published.num_kv_heads == 0,
              config.path(), ": the ", published.num_kv_heads, " key and value heads of layers of full_attention, of ",
              published.head_dim, " channels, must divide num_attention_heads ", network.num_heads);
  return published;
}

std::string read_layer_type(const HfConfig& config, const std::vector<std::string>& known, int64_t num_layers,
                            int64_t index, const char* key) {
  const auto types = config.need<std::vector<std::string>>(key);
  TORCH_CHECK(std::ssize(types) == num_layers, config.path(), ": ", key, " has ", types.size(),
              " entries for num_hidden_layers ", num_layers);
  const auto& type = types[static_cast<size_t>(index)];
  TORCH_CHECK(std::ranges::count(known, type) > 0, config.path(), ": ", key, " has ", type,
              ", which this model_type does not support; known are ", c10::Join(", ", known));
  return type;
}

MoeConfig read_moe(const HfConfig& config, const MoeDefaults& defaults) {
  MoeConfig moe{.num_experts = config.get_either("num_experts", "num_local_experts", defaults.num_experts),
                .experts_per_token = config.get("num_experts_per_tok", defaults.experts_per_token),
                .intermediate_size = config.get(defaults.intermediate_key, defaults.intermediate_size),
                .router = {.normalise_weights = config.get("norm_topk_prob", false)},
                .sparse_step = config.get<int64_t>("decoder_sparse_step", 1),
                .dense_layers = config.get_or_null("mlp_only_layers", std::vector<int64_t>{})};
  const auto coefficient = config.get("router_aux_loss_coef", 0.001);
  if (config.get("output_router_logits", false)) moe.aux_loss_coef = coefficient;
  config.require_computed(config.get("router_jitter_noise", 0.0) == 0,
                          "router_jitter_noise is not supported; write 0 there");
  TORCH_CHECK(moe.num_experts > 0 && moe.experts_per_token > 0 && moe.experts_per_token <= moe.num_experts &&
                  moe.intermediate_size > 0 && moe.sparse_step > 0,
              config.path(), ": num_experts ", moe.num_experts, ", num_experts_per_tok ", moe.experts_per_token, ", ",
              defaults.intermediate_key, " ", moe.intermediate_size, " and decoder_sparse_step ", moe.sparse_step,
              " must be positive, and a token cannot have more experts than there are");
  return moe;
}

MoeConfig read_grouped_moe(const HfConfig& config, const GroupedMoeDefaults& defaults, int64_t num_layers) {
  const auto width = config.get("moe_intermediate_size", defaults.intermediate_size);
  const auto either = [&](const auto& keys, auto fallback) {
    return config.get_either(keys.first, keys.second, fallback);
  };
  const auto [groups_key, groups_alias] = defaults.groups_keys;
  const bool no_groups = config.is_null(groups_key) || config.is_null(groups_alias);
  MoeConfig moe{.num_experts = either(defaults.experts_keys, defaults.num_experts),
                .experts_per_token = either(defaults.per_token_keys, defaults.experts_per_token),
                .intermediate_size = width,
                .router = {.score = RouterConfig::Score::kSigmoid,
                           .in_fp32 = true,
                           .corrects_choice = true,
                           .normalise_weights = either(defaults.normalises_keys, true),
                           .normalise_eps = 1e-20,
                           .scale = config.get("routed_scaling_factor", defaults.scale),
                           .groups = no_groups ? defaults.groups : either(defaults.groups_keys, defaults.groups),
                           .chosen_groups = config.get_or_null("topk_group", defaults.chosen_groups)},
                .shared = {.intermediate_size = width * either(defaults.shared_keys, defaults.shared_experts),
                           .name = "shared_experts"}};
  const auto dense = std::min(config.get("first_k_dense_replace", defaults.dense_layers), num_layers);
  for (int64_t layer = 0; layer < dense; ++layer) moe.dense_layers.push_back(layer);
  const auto [groups, chosen] = std::pair(moe.router.groups, moe.router.chosen_groups);
  TORCH_CHECK(moe.num_experts > 0 && moe.experts_per_token > 0 && width > 0 && groups > 0 && chosen > 0 &&
                  chosen <= groups && moe.num_experts % groups == 0 &&
                  moe.experts_per_token <= moe.num_experts / groups * chosen,
              config.path(), ": ", defaults.experts_keys.first, " ", moe.num_experts, ", ",
              defaults.per_token_keys.first, " ", moe.experts_per_token, ", moe_intermediate_size ", width, ", ",
              groups_key, " ", groups, " and topk_group ", chosen, " must be positive, ", groups_key,
              " must divide the experts, and topk_group groups must have as many experts as ", "a token has");
  return moe;
}

void read_latent(const HfConfig& config, DecoderConfig& network, const LatentConfig& defaults) {
  const LatentConfig latent{
      .query_rank = config.is_null("q_lora_rank") ? 0 : config.get("q_lora_rank", defaults.query_rank),
      .key_rank = config.get("kv_lora_rank", defaults.key_rank),
      .plain_dim = config.get("qk_nope_head_dim", defaults.plain_dim),
      .value_dim = config.get("v_head_dim", defaults.value_dim)};
  TORCH_CHECK(latent.query_rank >= 0 && latent.key_rank > 0 && latent.plain_dim > 0 && latent.value_dim > 0,
              config.path(), ": q_lora_rank, kv_lora_rank, qk_nope_head_dim and v_head_dim must be positive");
  TORCH_CHECK(network.num_kv_heads == network.num_heads, config.path(), ": num_key_value_heads ", network.num_kv_heads,
              " must be num_attention_heads ", network.num_heads, ": every head has its own keys and values");
  network.latent = latent;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
}

DecoderConfig read_decoder(const HfConfig& config, const DecoderDefaults& defaults) {
  TORCH_CHECK(!config.object("text_config"), config.path(),
              ": text_config belongs to vision-language models, and this is of another model_type: take it out");
  const auto hidden = config.need<int64_t>("hidden_size");
  const auto read = [&](const char* key, std::optional<int64_t> fallback) {
    return fallback ? config.get(key, *fallback) : config.need<int64_t>(key);
  };
  const auto heads = read("num_attention_heads", defaults.num_heads);
  const auto layers = read("num_hidden_layers", defaults.num_layers);
  const auto max_positions = config.get("max_position_embeddings", defaults.max_positions);
  TORCH_CHECK(hidden > 0 && heads > 0 && layers > 0, config.path(),
              ": hidden_size, num_attention_heads and num_hidden_layers must be positive");
  const auto kv_heads = config.is_null("num_key_value_heads") || defaults.kv_heads == 0
                            ? config.get_or_null("num_key_value_heads", heads)
                            : config.get("num_key_value_heads", defaults.kv_heads);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, config.path(), ": num_attention_heads ", heads,
              " is not divisible by num_key_value_heads ", kv_heads);
  DecoderConfig network{
      .names = defaults.names,
      .vocab_size = read("vocab_size", defaults.vocab_size),
      .hidden_size = hidden,
      .intermediate_size = read("intermediate_size", defaults.intermediate_size),
      .num_layers = layers,
      .num_heads = heads,
      .num_kv_heads = kv_heads,
      .head_dim =
          config.get_or_null(defaults.head_dim_key, defaults.head_dim == 0 ? hidden / heads : defaults.head_dim),
      .max_positions = max_positions,
      .norm_eps = config.get(defaults.norm_eps_key, defaults.norm_eps),
      .activation = read_activation(config, defaults.activation_key, defaults.activation),
      .tie_word_embeddings = config.get("tie_word_embeddings", defaults.tie_word_embeddings),
      .attention_dropout = config.get("attention_dropout", defaults.attention_dropout),
      .init_std = config.get("initializer_range", 0.02),
  };
  TORCH_CHECK(network.vocab_size > 0 && (network.intermediate_size > 0 || defaults.intermediate_size == 0) &&
                  network.head_dim > 0 && network.head_dim % 2 == 0,
              config.path(), ": vocab_size and intermediate_size must be positive, and ", defaults.head_dim_key, " (",
              network.head_dim, ") even");
  TORCH_CHECK(network.norm_eps >= 0, config.path(), ": rms_norm_eps ", network.norm_eps, " must not be negative");
  const double dropout = network.attention_dropout;
  TORCH_CHECK(dropout >= 0 && dropout <= 1, config.path(), ": attention_dropout ", dropout, " must be from 0 to 1");
  if (!defaults.rotates_by_layer)
    network.rotary = read_rotary(config, defaults.rotary, network, defaults.rotates_partially);
  check_sections(config, network);
  network.pad_token_id = read_padding(config, network.vocab_size, defaults.pad_token_id);
  return network;
}

}  // namespace megashard
