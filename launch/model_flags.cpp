#include "launch/model_flags.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "framework/argument_table.h"

namespace megashard {
namespace {

/// Fields of NetworkArguments by Megatron's name, with the flag that sets them.
std::vector<ExplicitFlag> explicit_network_flags(const Arguments& arguments) {
  std::vector<ExplicitFlag> flags;
  for (const auto& [name, value] : argument_values(arguments)) {
    if (!arguments.is_given(name)) continue;
    const Option* option = find_argument(name);
    ExplicitFlag flag;
    flag.name = option->flag;
    if (const auto* each = std::get_if<bool>(&value)) {
      flag.value = *each;
    } else if (const auto* each = std::get_if<int64_t>(&value)) {
      flag.value = *each;
    } else if (const auto* each = std::get_if<double>(&value)) {
      flag.value = *each;
    } else if (const auto* each = std::get_if<std::string>(&value)) {
      flag.value = *each;
    } else {
      continue;
    }
    flags.push_back(std::move(flag));
  }
  return flags;
}

DecoderOptions decoder_options(const Arguments& arguments) {
  DecoderOptions options;
  options.num_layers = *arguments.num_layers;
  options.hidden_size = *arguments.hidden_size;
  options.num_attention_heads = *arguments.num_attention_heads;
  options.max_position_embeddings = *arguments.max_position_embeddings;
  options.padded_vocab_size = *arguments.padded_vocab_size;
  options.ffn_hidden_size = arguments.ffn_hidden_size;
  options.kv_channels = arguments.kv_channels;
  options.group_query_attention = arguments.group_query_attention;
  options.num_query_groups = arguments.num_query_groups;
  options.position_embedding_type = arguments.position_embedding_type;
  options.rotary_base = static_cast<double>(arguments.rotary_base);
  options.rotary_percent = arguments.rotary_percent;
  options.rotary_interleaved = arguments.rotary_interleaved;
  if (arguments.rotary_seq_len_interpolation_factor) {
    options.rotary_seq_len_interpolation_factor =
        static_cast<double>(*arguments.rotary_seq_len_interpolation_factor);
  }
  options.use_rope_scaling = arguments.use_rope_scaling;
  options.rope_scaling_factor = arguments.rope_scaling_factor;
  options.normalization = arguments.normalization;
  options.norm_epsilon = arguments.norm_epsilon;
  options.apply_layernorm_1p = arguments.apply_layernorm_1p;
  options.openai_gelu = arguments.openai_gelu;
  options.squared_relu = arguments.squared_relu;
  options.swiglu = arguments.swiglu;
  options.untie_embeddings_and_output_weights = arguments.untie_embeddings_and_output_weights;
  options.add_bias_linear = arguments.add_bias_linear;
  options.add_qkv_bias = arguments.add_qkv_bias;
  options.qk_layernorm = arguments.qk_layernorm;
  options.attention_dropout = arguments.attention_dropout;
  options.hidden_dropout = arguments.hidden_dropout;
  options.init_method_std = arguments.init_method_std;
  return options;
}

int64_t eos_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) return -1;
  const auto json = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("eos_token_id")) return -1;
  const auto& eos = json["eos_token_id"];
  if (eos.is_array() && !eos.empty() && eos[0].is_number_integer()) return eos[0].get<int64_t>();
  return eos.is_number_integer() ? eos.get<int64_t>() : -1;
}

}  // namespace

ModelContext model_context(const Arguments& arguments) {
  ModelContext context;
  if (!arguments.hf_model) {
    context.options = decoder_options(arguments);
    return context;
  }
  context.hf_dir = *arguments.hf_model;
  context.explicit_flags = explicit_network_flags(arguments);
  context.untie_embeddings = arguments.untie_embeddings_and_output_weights;
  if (arguments.is_given("init_method_std")) context.init_method_std = arguments.init_method_std;
  return context;
}

int64_t end_of_document_id(const Arguments& arguments) {
  if (arguments.tokenizer_type == "NullTokenizer") return arguments.vocab_size.value_or(-1);
  for (const auto& directory : {arguments.tokenizer_model, arguments.hf_model}) {
    if (!directory) continue;
    if (const int64_t eos = eos_in(std::filesystem::path(*directory) / "config.json"); eos >= 0)
      return eos;
  }
  return -1;
}

}  // namespace megashard
