#include "models/config/read_decoder_config.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int64_t> read_sections(const HfConfig& config, const Json& section) {
  const bool fits = section.is_array() && section.size() == 3 &&
                    std::all_of(section.begin(), section.end(),
                                [](const Json& each) { return each.is_number_integer() && each.get<int64_t>() >= 0; });
  TORCH_CHECK(fits, config.path(), ": mrope_section must be three counts of channel pairs, got ", section.dump());
  return section.get<std::vector<int64_t>>();
}

void check_sections(const HfConfig& config, const DecoderConfig& network) {
  const auto& rotary = network.rotary;
  if (rotary.mrope_section.empty() || rotary.mrope_interleaved) return;
  const auto sum = std::accumulate(rotary.mrope_section.begin(), rotary.mrope_section.end(), int64_t{0});
  TORCH_CHECK(2 * sum == network.head_dim, config.path(), ": mrope_section ", c10::IntArrayRef(rotary.mrope_section),
              " must add up to half of the head dimension ", network.head_dim);
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
          .router = prefix + "TopKRouter"};
}

Activation read_activation(const HfConfig& config, const char* key, const std::string& fallback) {
  static const std::map<std::string, Activation> known = {{"silu", Activation::kSilu},
                                                          {"swish", Activation::kSilu},
                                                          {"gelu", Activation::kGelu},
                                                          {"gelu_new", Activation::kGeluTanh},
                                                          {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                          {"relu", Activation::kRelu},
                                                          {"relu2", Activation::kSquaredRelu}};
  const auto name = config.get<std::string>(key, fallback);
  const auto found = known.find(name);
  config.require_computed(found != known.end(), key, " ", name,
                          " is not supported; known are silu, gelu, gelu_new, gelu_pytorch_tanh, relu and relu2");
  return found == known.end() ? Activation::kSilu : found->second;
}

RotaryConfig read_rotary(const HfConfig& config, const Json* parameters, RotaryConfig rotary, int64_t max_positions) {
  rotary.original_max_positions = static_cast<double>(max_positions);
  if (parameters == nullptr) return rotary;
  TORCH_CHECK(parameters->is_object(), config.path(), ": rope parameters must be an object, got ", parameters->dump());
  rotary.theta = config.get(*parameters, "rope_theta", rotary.theta);
  rotary.fraction = config.get(*parameters, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0));
  const auto type =
      config.get<std::string>(*parameters, "rope_type", config.get<std::string>(*parameters, "type", "default"));
  const bool has_axes = !rotary.mrope_section.empty();
  const auto* section = HfConfig::find(*parameters, "mrope_section");
  if (has_axes && section != nullptr) rotary.mrope_section = read_sections(config, *section);
  if (type == "default" || (type == "mrope" && has_axes) || !config.describes_computation()) return rotary;
  TORCH_CHECK(type == "linear" || type == "llama3", config.path(), ": rope_type ", type,
              " is not supported; known are default, linear and llama3");
  rotary.factor = config.need<double>(*parameters, "factor");
  rotary.kind = RotaryConfig::Kind::kLinear;
  if (type == "linear") return rotary;
  rotary.kind = RotaryConfig::Kind::kLlama3;
  rotary.low_freq_factor = config.need<double>(*parameters, "low_freq_factor");
  rotary.high_freq_factor = config.need<double>(*parameters, "high_freq_factor");
  rotary.original_max_positions =
      config.get(*parameters, "original_max_position_embeddings", rotary.original_max_positions);
  return rotary;
}

RotaryConfig read_rotary(const HfConfig& config, const RotaryConfig& defaults, int64_t max_positions) {
  auto rotary = defaults;
  rotary.theta = config.get("rope_theta", defaults.theta);
  const auto* parameters = config.find("rope_parameters");
  if (parameters == nullptr) parameters = config.find("rope_scaling");
  return read_rotary(config, parameters, rotary, max_positions);
}

int64_t read_sliding_window(const HfConfig& config, int64_t fallback) {
  if (config.is_null("sliding_window")) return 0;
  const auto window = config.get("sliding_window", fallback);
  config.require_computed(window > 0, "sliding_window ", window, " must be positive, or null for full attention");
  return window;
}

std::vector<int64_t> read_sliding_layers(const HfConfig& config, int64_t num_layers,
                                         const std::function<bool(int64_t layer)>& slides) {
  const auto types = config.get("layer_types", std::vector<std::string>{});
  config.require_computed(types.empty() || static_cast<int64_t>(types.size()) == num_layers, "layer_types has ",
                          types.size(), " entries for num_hidden_layers ", num_layers);
  for (const auto& type : types) {
    config.require_computed(type == "sliding_attention" || type == "full_attention", "layer_types has ", type,
                            ", which is not supported; known are full_attention and sliding_attention");
  }
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const auto index = static_cast<size_t>(layer);
    if (index < types.size() ? types[index] == "sliding_attention" : slides(layer)) layers.push_back(layer);
  }
  return layers;
}

void read_window_of_all_layers(const HfConfig& config, DecoderConfig& network) {
  network.sliding_window = read_sliding_window(config, 4096);
  network.sliding_layers.resize(static_cast<size_t>(network.num_layers));
  std::iota(network.sliding_layers.begin(), network.sliding_layers.end(), int64_t{0});
}

void read_optional_windows(const HfConfig& config, DecoderConfig& network) {
  if (!config.get("use_sliding_window", false)) return;
  network.sliding_window = read_sliding_window(config, 4096);
  const auto first = config.get<int64_t>("max_window_layers", 28);
  network.sliding_layers =
      read_sliding_layers(config, network.num_layers, [first](int64_t layer) { return layer >= first; });
}

MoeConfig read_moe(const HfConfig& config) {
  MoeConfig moe{.num_experts = config.get("num_experts", config.get<int64_t>("num_local_experts", 128)),
                .experts_per_token = config.get<int64_t>("num_experts_per_tok", 8),
                .intermediate_size = config.get<int64_t>("moe_intermediate_size", 768),
                .normalise_weights = config.get("norm_topk_prob", false),
                .sparse_step = config.get<int64_t>("decoder_sparse_step", 1),
                .dense_layers = config.get("mlp_only_layers", std::vector<int64_t>{})};
  if (config.get("output_router_logits", false)) moe.aux_loss_coef = config.get("router_aux_loss_coef", 0.001);
  TORCH_CHECK(moe.num_experts > 0 && moe.experts_per_token > 0 && moe.experts_per_token <= moe.num_experts &&
                  moe.intermediate_size > 0 && moe.sparse_step > 0,
              config.path(), ": num_experts ", moe.num_experts, ", num_experts_per_tok ", moe.experts_per_token,
              ", moe_intermediate_size ", moe.intermediate_size, " and decoder_sparse_step ", moe.sparse_step,
              " must be positive, and a token cannot have more experts than there are");
  return moe;
}

DecoderConfig read_decoder(const HfConfig& config, const DecoderDefaults& defaults) {
  const auto hidden = config.need<int64_t>("hidden_size");
  const auto heads = config.need<int64_t>("num_attention_heads");
  const auto layers = config.need<int64_t>("num_hidden_layers");
  const auto max_positions = config.get("max_position_embeddings", defaults.max_positions);
  TORCH_CHECK(hidden > 0 && heads > 0 && layers > 0, config.path(),
              ": hidden_size, num_attention_heads and num_hidden_layers must be positive");
  const auto kv_heads = config.get("num_key_value_heads", defaults.kv_heads == 0 ? heads : defaults.kv_heads);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, config.path(), ": num_attention_heads ", heads,
              " is not divisible by num_key_value_heads ", kv_heads);
  DecoderConfig network{
      .names = defaults.names,
      .vocab_size = config.need<int64_t>("vocab_size"),
      .hidden_size = hidden,
      .intermediate_size = config.need<int64_t>("intermediate_size"),
      .num_layers = layers,
      .num_heads = heads,
      .num_kv_heads = kv_heads,
      .head_dim = config.get("head_dim", defaults.head_dim == 0 ? hidden / heads : defaults.head_dim),
      .max_positions = max_positions,
      .norm_eps = config.get("rms_norm_eps", defaults.norm_eps),
      .activation = read_activation(config, defaults.activation_key, defaults.activation),
      .rotary = read_rotary(config, defaults.rotary, max_positions),
      .tie_word_embeddings = config.get("tie_word_embeddings", defaults.tie_word_embeddings),
      .attention_dropout = config.get("attention_dropout", 0.0),
      .init_std = config.get("initializer_range", 0.02),
  };
  check_sections(config, network);
  const auto pad = config.get<int64_t>("pad_token_id", -1);
  if (pad >= 0 && pad < network.vocab_size) network.pad_token_id = pad;
  TORCH_CHECK(
      network.vocab_size > 0 && network.intermediate_size > 0 && network.head_dim > 0 && network.head_dim % 2 == 0,
      config.path(), ": vocab_size and intermediate_size must be positive, and the head dimension (", network.head_dim,
      ") even");
  return network;
}

}  // namespace megashard
