#include "models/network_arguments.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <variant>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/layer_frequency.h"
#include "framework/mistakes.h"
#include "models/diffusion/latent_families.h"
#include "models/families/model_family.h"
#include "models/model_config.h"

namespace megashard {
namespace {

/// NullTokenizer's --vocab-size does not count the end of documents, and the model's vocabulary
/// does.
bool is_vocabulary(const DecoderConfig& config, const Arguments& arguments) {
  return arguments.vocab_size && unpadded_vocab_size(arguments) == config.vocab_size;
}

/// Layers with experts as --moe-layer-freq has them.
std::string layer_frequency(const MoeConfig& moe, int64_t num_layers) {
  std::vector<int> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) layers.push_back(moe.is_sparse(layer) ? 1 : 0);
  if (std::ranges::count(layers, 0) == 0) return "1";
  return "[" + c10::Join(",", layers) + "]";
}

bool same_layers(const std::string& frequency, const std::string& other, int64_t num_layers) {
  return expand_layer_frequency(kMoeLayerFreq, frequency, num_layers) ==
         expand_layer_frequency(kMoeLayerFreq, other, num_layers);
}

void add_experts(const DecoderConfig& config, std::map<std::string, ArgumentValue>& values) {
  const auto& moe = config.moe;
  if (moe.num_experts == 0) {
    values["num_experts"] = std::monostate();
    return;
  }
  using Score = RouterConfig::Score;
  const auto optional = [](auto value, auto none) { return value == none ? ArgumentValue() : ArgumentValue(value); };
  const auto& router = moe.router;
  values.insert({
      {"num_experts", moe.num_experts},
      {"moe_layer_freq", layer_frequency(moe, config.num_layers)},
      {"moe_ffn_hidden_size", moe.intermediate_size},
      {"moe_router_topk", moe.experts_per_token},
      {"moe_router_score_function", std::string(router.score == Score::kSigmoid ? "sigmoid" : "softmax")},
      {"moe_router_topk_scaling_factor", optional(router.scale, 1.0)},
      {"moe_router_num_groups", optional(router.groups, int64_t{1})},
      {"moe_router_group_topk", router.groups == 1 ? ArgumentValue() : ArgumentValue(router.chosen_groups)},
      {"moe_shared_expert_intermediate_size", optional(moe.shared.intermediate_size, int64_t{0})},
      {"moe_shared_expert_gate", moe.shared.gated},
      {"moe_latent_size", optional(moe.latent_size, int64_t{0})},
  });
  // Softmax over a token's experts is softmax over all, normalised.
  const bool normalised = router.score == Score::kLogit || router.normalise_weights;
  if (router.score != Score::kSigmoid) values["moe_router_pre_softmax"] = !normalised;
}

void add_latent_attention(const DecoderConfig& config, std::map<std::string, ArgumentValue>& values) {
  values["multi_latent_attention"] = config.latent.has_value();
  if (!config.latent) return;
  const auto& latent = *config.latent;
  values["q_lora_rank"] = latent.query_rank == 0 ? ArgumentValue() : ArgumentValue(latent.query_rank);
  values["kv_lora_rank"] = latent.key_rank;
  values["qk_head_dim"] = latent.plain_dim;
  values["qk_pos_emb_head_dim"] = config.head_dim;
  values["v_head_dim"] = latent.value_dim;
  values["qk_layernorm"] = latent.norm_eps.has_value();
  values["rotary_scaling_factor"] = config.rotary.factor;
  for (const char* other : {"kv_channels", "rotary_interleaved", "rotary_percent"}) values.erase(other);
}

}  // namespace

std::map<std::string, ArgumentValue> network_values(const DecoderConfig& config) {
  const bool rotary = config.positions == PositionKind::kRotary;
  const bool scaled = config.rotary.kind == RotaryConfig::Kind::kLlama3;
  const auto& sections = config.rotary.mrope_section;
  std::map<std::string, ArgumentValue> values = {
      {"num_layers", config.num_layers},
      {"hidden_size", config.hidden_size},
      {"ffn_hidden_size", config.intermediate_size},
      {"num_attention_heads", config.num_heads},
      {"num_query_groups", config.num_kv_heads},
      {"kv_channels", config.head_dim},
      {"max_position_embeddings", config.max_positions},
      {"vocab_size", config.vocab_size},
      {"padded_vocab_size", config.vocab_size},
      {"group_query_attention", config.num_kv_heads != config.num_heads},
      {"position_embedding_type", std::string(!rotary            ? "learned_absolute"
                                              : sections.empty() ? "rope"
                                                                 : "mrope")},
      {"use_rotary_position_embeddings", rotary},
      {"rotary_base", config.rotary.theta},
      {"rotary_percent", config.rotary.fraction},
      {"rotary_interleaved", config.rotary.interleaved},
      {"use_rope_scaling", scaled},
      {"normalization", std::string(config.norm == NormKind::kRmsNorm ? "RMSNorm" : "LayerNorm")},
      {"norm_epsilon", config.norm_eps},
      {"apply_layernorm_1p", config.zero_centered_norm},
      {"openai_gelu", config.activation == Activation::kGeluTanh},
      {"squared_relu", config.activation == Activation::kSquaredRelu},
      {"swiglu", config.gated_mlp && config.activation == Activation::kSilu},
      {"add_bias_linear", config.mlp_bias || config.attention_out_bias},
      {"add_qkv_bias", config.qkv_bias},
      {"qk_layernorm", config.qk_norm},
      {"attention_output_gate", config.attention_gate},
      {"softmax_type", std::string(config.attention_sinks ? "learnable" : "vanilla")},
      {"attention_dropout", config.attention_dropout},
      {"hidden_dropout", config.hidden_dropout},
  };
  add_experts(config, values);
  add_latent_attention(config, values);
  if (scaled) values["rope_scaling_factor"] = config.rotary.factor;
  if (config.rotary.kind == RotaryConfig::Kind::kLinear)
    values["rotary_seq_len_interpolation_factor"] = config.rotary.factor;
  return values;
}

std::vector<std::string> contradictions(const DecoderConfig& config, const Arguments& arguments) {
  std::vector<std::string> messages;
  const auto values = network_values(config);
  for (const auto& [name, value] : argument_values(arguments)) {
    const auto found = values.find(name);
    if (!arguments.is_given(name) || found == values.end() || same_value(found->second, value)) continue;
    if (name == "vocab_size" && is_vocabulary(config, arguments)) continue;
    if (name == "moe_layer_freq" &&
        same_layers(std::get<std::string>(value), std::get<std::string>(found->second), config.num_layers))
      continue;
    const Option& option = *find_argument(name);
    const std::string given = argument_text(value);
    messages.push_back(option.flag + (option.is_switch() ? " (" + name + " = " + given + ")" : " " + given) +
                       " contradicts the model's config.json, which says " + argument_text(found->second) +
                       ": leave the flag out, or edit config.json");
  }
  return messages;
}

Dict network_arguments(const DecoderConfig& config) {
  Dict arguments;
  for (const auto& [name, value] : network_values(config)) {
    if (const auto* flag = std::get_if<bool>(&value)) arguments.set(name, *flag);
    if (const auto* whole = std::get_if<int64_t>(&value)) arguments.set(name, *whole);
    if (const auto* real = std::get_if<double>(&value)) arguments.set(name, *real);
    if (const auto* text = std::get_if<std::string>(&value)) arguments.set(name, *text);
  }
  arguments.set("rotary_base", static_cast<int64_t>(std::llround(config.rotary.theta)));
  arguments.set("untie_embeddings_and_output_weights", !config.tie_word_embeddings);
  return arguments;
}

namespace {

/// Beyond it rotary positions turn by angles that training never saw.
int64_t longest_sequence(const DecoderConfig& config) {
  const auto& rotary = config.rotary;
  if (rotary.kind == RotaryConfig::Kind::kDefault) return config.max_positions;
  const auto scaled = static_cast<int64_t>(rotary.factor * rotary.original_max_positions);
  return std::max(config.max_positions, scaled);
}

void warn_of_length(const DecoderConfig& config, const Arguments& arguments, const DiagnosticSink& sink) {
  const int64_t longest = longest_sequence(config);
  const int64_t length = arguments.seq_length.value_or(0);
  if (length <= longest) return;
  const auto factor = std::to_string((length + longest - 1) / longest);
  const bool plain = config.rotary.kind == RotaryConfig::Kind::kDefault;
  sink(Severity::kWarning, "--seq-length " + std::to_string(length) + " is more than the " + std::to_string(longest) +
                               " positions (max_position_embeddings) of " + *arguments.hf_model +
                               ", which the model was not trained for: shorten it, or " +
                               (plain ? "scale the positions by \"rope_type\": \"linear\", \"factor\": " + factor +
                                            ".0 in the rope_parameters of config.json (older ones: rope_scaling)"
                                      : "multiply the factor of its rope scaling in config.json by " + factor));
}

void tell_replaced_balance(const Arguments& arguments, const HfConfig& config, const DiagnosticSink& sink) {
  if (!replaces_balance_of_config(arguments)) return;
  const double replaced = decoder_config_from_hf(config).moe.aux_loss_coef;
  if (replaced == 0) return;
  sink(Severity::kNotice, "the experts are balanced by Megatron's loss, as the flags say (--moe-aux-loss-coeff " +
                              argument_text(arguments.moe_aux_loss_coeff) +
                              "), and not by transformers', for which config.json says router_aux_loss_coef " +
                              argument_text(replaced) + ".");
}

/// Throws for flags of language models.
void check_flags(const LatentFamily& family, const Arguments& arguments) {
  Mistakes mistakes;
  for (const auto& [name, value] : network_values(DecoderConfig())) {
    const bool is_of_language = name != "vocab_size" && arguments.is_given(name);
    mistakes.require(!is_of_language, find_argument(name)->flag + " describes a language model, and " +
                                          *arguments.hf_model + " has a " + family.class_name + "; leave it out.");
  }
  mistakes.throw_if_any();
}

}  // namespace

std::optional<HfConfig> take_network_from_hf_model(Arguments& arguments, const DiagnosticSink& sink) {
  if (!arguments.hf_model) return std::nullopt;
  std::optional<HfConfig> file;
  DecoderConfig config;
  try {
    file.emplace(HfConfig::of_model(*arguments.hf_model));
    if (const auto* family = latent_family_of(file->json())) {
      check_settings(*family, *file);
      check_flags(*family, arguments);
      return file;
    }
    if (is_of_plugin(arguments, *file)) return file;
    config = network_of(arguments, *file).config;
  } catch (const c10::Error& error) {  // a config.json that is wrong now will be wrong again
    throw UsageError(error.what_without_backtrace());
  }
  if (arguments.untie_embeddings_and_output_weights && config.tie_word_embeddings) {
    sink(Severity::kNotice, "--untie-embeddings-and-output-weights is not used: " + *arguments.hf_model +
                                "/config.json says \"tie_word_embeddings\": true; write false there to train a head of "
                                "its own");
  }
  warn_of_length(config, arguments, sink);
  tell_replaced_balance(arguments, *file, sink);
  auto values = network_values(config);
  values.erase("vocab_size");  // NullTokenizer's: the text's, not the model's
  values["untie_embeddings_and_output_weights"] = !config.tie_word_embeddings;
  values["init_method_std"] = config.init_std;
  for (const auto& [name, value] : values) {
    if (set_argument_value(name, value, arguments)) continue;
    set_argument_value(name, std::llround(std::get<double>(value)), arguments);  // rotary_base
  }
  return file;
}

}  // namespace megashard
