// decoder_config_from_hf of model_config.h.
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "models/hugging_face/hf_config.h"
#include "models/hugging_face/hf_directory.h"
#include "models/hugging_face/hf_families.h"
#include "models/model_config.h"

namespace megashard {
namespace {

using Json = nlohmann::ordered_json;

const HfFamily& family_of(const HfConfig& config) {
  const auto type = config.need<std::string>("model_type");
  const auto found = hf_families().find(type);
  if (found != hf_families().end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, family] : hf_families()) names.push_back(name);
  TORCH_CHECK(false, config.path(), ": model_type ", type, " is not supported; known are: ", c10::Join(", ", names));
}

Activation activation_of(const HfConfig& config) {
  static const std::map<std::string, Activation> known = {{"silu", Activation::kSilu},
                                                          {"swish", Activation::kSilu},
                                                          {"gelu", Activation::kGelu},
                                                          {"gelu_new", Activation::kGeluTanh},
                                                          {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                          {"relu", Activation::kRelu},
                                                          {"relu2", Activation::kSquaredRelu}};
  const auto name = config.get<std::string>("hidden_act", "silu");
  const auto found = known.find(name);
  TORCH_CHECK(found != known.end(), config.path(), ": hidden_act ", name,
              " is not supported; known are silu, gelu, gelu_new, gelu_pytorch_tanh, relu and relu2");
  return found->second;
}

/// rope_theta and rope_scaling, or the rope_parameters that transformers 5 writes in their place.
RotaryConfig rotary_of(const HfConfig& config, const HfFamily& family, int64_t max_positions) {
  RotaryConfig rotary{.theta = config.get("rope_theta", family.default_theta)};
  rotary.original_max_positions = static_cast<double>(max_positions);
  rotary.mrope_section = family.mrope_section;
  rotary.mrope_interleaved = family.qk_norm;
  const auto* scaling = config.find("rope_parameters");
  if (scaling == nullptr) scaling = config.find("rope_scaling");
  if (scaling == nullptr) return rotary;
  TORCH_CHECK(scaling->is_object(), config.path(), ": rope parameters must be an object, got ", scaling->dump());
  rotary.theta = config.get(*scaling, "rope_theta", rotary.theta);
  rotary.fraction = config.get(*scaling, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0));
  const auto type =
      config.get<std::string>(*scaling, "rope_type", config.get<std::string>(*scaling, "type", "default"));
  if (!family.mrope_section.empty() && config.find(*scaling, "mrope_section") != nullptr) {
    const auto& section = scaling->at("mrope_section");
    const bool fits =
        section.is_array() && section.size() == 3 && std::all_of(section.begin(), section.end(), [](const Json& each) {
          return each.is_number_integer() && each.get<int64_t>() >= 0;
        });
    TORCH_CHECK(fits, config.path(), ": mrope_section must be three counts of channel pairs, got ", section.dump());
    rotary.mrope_section = section.get<std::vector<int64_t>>();
  }
  if (type == "default" || (type == "mrope" && !family.mrope_section.empty())) return rotary;
  TORCH_CHECK(type == "linear" || type == "llama3", config.path(), ": rope_type ", type,
              " is not supported; known are default, linear and llama3");
  rotary.factor = config.need<double>(*scaling, "factor");
  rotary.kind = RotaryConfig::Kind::kLinear;
  if (type == "linear") return rotary;
  rotary.kind = RotaryConfig::Kind::kLlama3;
  rotary.low_freq_factor = config.need<double>(*scaling, "low_freq_factor");
  rotary.high_freq_factor = config.need<double>(*scaling, "high_freq_factor");
  rotary.original_max_positions =
      config.get(*scaling, "original_max_position_embeddings", rotary.original_max_positions);
  return rotary;
}

/// Sliding-window attention is not computed here; it is refused where a token of the longest
/// sequence would miss one. `first`: the first layer with a window, unless the file says it.
void refuse_windows(const HfConfig& config, int64_t first, int64_t layers, int64_t max_positions) {
  const bool windows = config.get("use_sliding_window", false);
  const auto window = config.get<int64_t>("sliding_window", 4096);
  if (!windows || config.find("sliding_window") == nullptr || window >= max_positions) return;
  const auto* types = config.find("layer_types");
  const bool used = types == nullptr ? first < layers : types->dump().find("sliding_attention") != std::string::npos;
  TORCH_CHECK(
      !used, config.path(), ": sliding_window ", window, " is shorter than max_position_embeddings ", max_positions,
      ", and sliding-window attention is not supported: set use_sliding_window to false to train with full attention");
}

MoeConfig moe_of(const HfConfig& config) {
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

/// Where the classes of a text part do not follow the pattern of the text models.
void name_text_part(const std::string& model_type, ModuleNames& names) {
  if (model_type == "qwen2_5_vl") {
    names.mlp = "Qwen2MLP";
    names.decoder = "Qwen2_5_VLTextModel";
    names.model = "Qwen2_5_VLForConditionalGeneration";
  } else {
    names.model = model_type == "qwen3_vl" ? "Qwen3VLForConditionalGeneration" : "Qwen3VLMoeForConditionalGeneration";
  }
}

void check_sections(const HfConfig& config, const DecoderConfig& network) {
  const auto& rotary = network.rotary;
  if (rotary.mrope_section.empty() || rotary.mrope_interleaved) return;
  const auto sum = std::accumulate(rotary.mrope_section.begin(), rotary.mrope_section.end(), int64_t{0});
  TORCH_CHECK(2 * sum == network.head_dim, config.path(), ": mrope_section ", c10::IntArrayRef(rotary.mrope_section),
              " must add up to half of the head dimension ", network.head_dim);
}

}  // namespace

DecoderConfig decoder_config_from_hf(const std::filesystem::path& hf_dir) {
  return decoder_config_from_hf(need_model_config(hf_dir.string()), (hf_dir / "config.json").string());
}

DecoderConfig decoder_config_from_hf(const Json& config_json, const std::string& path) {
  const HfConfig root(config_json, path);
  const auto& family = family_of(root);
  const bool sees = !family.mrope_section.empty();
  const auto* text = sees ? root.find("text_config") : nullptr;
  const HfConfig hf(text == nullptr ? config_json : *text, path);
  const std::string prefix = family.prefix;
  const auto hidden = hf.need<int64_t>("hidden_size");
  const auto heads = hf.need<int64_t>("num_attention_heads");
  const auto layers = hf.need<int64_t>("num_hidden_layers");
  const auto max_positions = hf.get<int64_t>("max_position_embeddings", prefix == "Llama" ? 2048 : 32768);
  TORCH_CHECK(hidden > 0 && heads > 0 && layers > 0, hf.path(),
              ": hidden_size, num_attention_heads and num_hidden_layers must be positive");
  const auto kv_heads =
      hf.get<int64_t>("num_key_value_heads", family.default_kv_heads == 0 ? heads : family.default_kv_heads);
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, hf.path(), ": num_attention_heads ", heads,
              " is not divisible by num_key_value_heads ", kv_heads);
  const bool attention_bias = !family.always_qkv_bias && hf.get("attention_bias", false);
  if (family.windows) {
    const auto first = family.experts ? 0 : hf.get<int64_t>("max_window_layers", 28);
    refuse_windows(hf, first, layers, max_positions);
  }

  DecoderConfig config{
      .names = {.norm = prefix + "RMSNorm",
                .rotary = prefix + "RotaryEmbedding",
                .attention = prefix + "Attention",
                .mlp = prefix + "MLP",
                .layer = prefix + "DecoderLayer",
                .decoder = prefix + "Model",
                .model = prefix + "ForCausalLM",
                .moe = prefix + "SparseMoeBlock",
                .router = prefix + "TopKRouter"},
      .vocab_size = hf.need<int64_t>("vocab_size"),
      .hidden_size = hidden,
      .intermediate_size = hf.need<int64_t>("intermediate_size"),
      .num_layers = layers,
      .num_heads = heads,
      .num_kv_heads = kv_heads,
      .head_dim = hf.get<int64_t>("head_dim", family.default_head_dim.value_or(hidden / heads)),
      .max_positions = max_positions,
      .norm_eps = hf.get("rms_norm_eps", family.default_norm_eps),
      .activation = activation_of(hf),
      .rotary = rotary_of(hf, family, max_positions),
      .qkv_bias = family.always_qkv_bias || attention_bias,
      .attention_out_bias = attention_bias,
      .mlp_bias = family.mlp_bias && hf.get("mlp_bias", false),
      .qk_norm = family.qk_norm,
      .tie_word_embeddings = root.get("tie_word_embeddings", false) ||
                             // where transformers 4 wrote it
                             (family.always_qkv_bias && hf.get("tie_word_embeddings", false)),
      .attention_dropout = hf.get("attention_dropout", 0.0),
      .init_std = hf.get("initializer_range", 0.02),
  };
  if (family.experts) config.moe = moe_of(hf);
  if (sees) config.moe.normalise_weights = true;  // config.json does not say
  if (sees) name_text_part(config_json.at("model_type"), config.names);
  check_sections(hf, config);
  const auto pad = hf.get<int64_t>("pad_token_id", -1);
  if (pad >= 0 && pad < config.vocab_size) config.pad_token_id = pad;
  TORCH_CHECK(config.vocab_size > 0 && config.intermediate_size > 0 && config.head_dim > 0 && config.head_dim % 2 == 0,
              hf.path(), ": vocab_size and intermediate_size must be positive, and the head dimension (",
              config.head_dim, ") even");
  return config;
}

}  // namespace megashard
