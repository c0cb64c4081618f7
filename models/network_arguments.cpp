#include "models/network_arguments.h"

#include <cmath>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"

namespace megashard {
namespace {

/// NullTokenizer's --vocab-size does not count the end of documents, and the model's vocabulary
/// does.
bool is_vocabulary(const DecoderConfig& config, const Arguments& arguments) {
  return arguments.vocab_size && unpadded_vocab_size(arguments) == config.vocab_size;
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
      {"attention_dropout", config.attention_dropout},
      {"hidden_dropout", config.hidden_dropout},
  };
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

}  // namespace megashard
