#include "models/model_config.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace megashard {
namespace {

void require_positive(int64_t value, const char* flag) {
  TORCH_CHECK(value > 0, flag, " must be given and positive, got ", value,
              " (or take the network from a Hugging Face directory by --hf-model)");
}

Activation activation_of(const DecoderOptions& options) {
  TORCH_CHECK(options.swiglu + options.openai_gelu + options.squared_relu <= 1,
              "--swiglu, --openai-gelu and --squared-relu exclude each other: give one of them at most");
  if (options.swiglu) return Activation::kSilu;
  if (options.squared_relu) return Activation::kSquaredRelu;
  return options.openai_gelu ? Activation::kGeluTanh : Activation::kGelu;
}

NormKind norm_of(const DecoderOptions& options) {
  TORCH_CHECK(!options.apply_layernorm_1p, "--apply-layernorm-1p is not supported: leave it out");
  if (options.normalization == "RMSNorm") return NormKind::kRmsNorm;
  TORCH_CHECK(options.normalization == "LayerNorm", "--normalization must be LayerNorm or RMSNorm, got ",
              options.normalization);
  return NormKind::kLayerNorm;
}

PositionKind positions_of(const DecoderOptions& options) {
  TORCH_CHECK(!options.rotary_interleaved, "--rotary-interleaved is not supported: leave it out");
  if (options.position_embedding_type == "rope") return PositionKind::kRotary;
  if (options.position_embedding_type == "none") return PositionKind::kNone;
  TORCH_CHECK(options.position_embedding_type == "learned_absolute",
              "--position-embedding-type must be learned_absolute, rope or none, got ", options.position_embedding_type);
  return PositionKind::kLearned;
}

RotaryConfig rotary_of(const DecoderOptions& options) {
  RotaryConfig rotary{.theta = options.rotary_base, .fraction = options.rotary_percent};
  const bool interpolated = options.rotary_seq_len_interpolation_factor.has_value();
  TORCH_CHECK(!(interpolated && options.use_rope_scaling),
              "--rotary-seq-len-interpolation-factor and --use-rope-scaling exclude each other: give one of them");
  if (interpolated) {
    rotary.kind = RotaryConfig::Kind::kLinear;
    rotary.factor = *options.rotary_seq_len_interpolation_factor;
  } else if (options.use_rope_scaling) {
    rotary.kind = RotaryConfig::Kind::kLlama3;
    rotary.factor = options.rope_scaling_factor;
  }
  return rotary;
}

}  // namespace

DecoderConfig decoder_config_from_options(const DecoderOptions& options) {
  require_positive(options.num_layers, "--num-layers");
  require_positive(options.hidden_size, "--hidden-size");
  require_positive(options.num_attention_heads, "--num-attention-heads");
  require_positive(options.max_position_embeddings, "--max-position-embeddings");
  require_positive(options.padded_vocab_size,
                   "the vocabulary size (--vocab-size, or the tokenizer's)");
  TORCH_CHECK(options.kv_channels || options.hidden_size % options.num_attention_heads == 0, "--hidden-size ",
              options.hidden_size, " is not divisible by --num-attention-heads ", options.num_attention_heads,
              ": change one of them, or give --kv-channels");
  const int64_t groups =
      options.group_query_attention ? options.num_query_groups : options.num_attention_heads;
  TORCH_CHECK(groups > 0 && options.num_attention_heads % groups == 0, "--num-attention-heads ",
              options.num_attention_heads, " is not divisible by --num-query-groups ", groups);

  const int64_t default_ffn =
      options.swiglu
          ? static_cast<int64_t>(static_cast<double>(options.hidden_size) * 4 * 2 / 3 / 64) * 64
          : 4 * options.hidden_size;
  DecoderConfig config{
      .names = {.norm = options.normalization,
                .rotary = "RotaryEmbedding",
                .attention = "SelfAttention",
                .mlp = "MLP",
                .layer = "TransformerLayer",
                .decoder = "TransformerBlock",
                .model = "GPTModel"},
      .vocab_size = options.padded_vocab_size,
      .hidden_size = options.hidden_size,
      .intermediate_size = options.ffn_hidden_size.value_or(default_ffn),
      .num_layers = options.num_layers,
      .num_heads = options.num_attention_heads,
      .num_kv_heads = groups,
      .head_dim = options.kv_channels.value_or(options.hidden_size / options.num_attention_heads),
      .max_positions = options.max_position_embeddings,
      .norm = norm_of(options),
      .norm_eps = options.norm_epsilon,
      .activation = activation_of(options),
      .gated_mlp = options.swiglu,
      .positions = positions_of(options),
      .rotary = rotary_of(options),
      .qkv_bias = options.add_bias_linear || options.add_qkv_bias,
      .attention_out_bias = options.add_bias_linear,
      .mlp_bias = options.add_bias_linear,
      .qk_norm = options.qk_layernorm,
      .residual_after_norm = options.apply_residual_connection_post_layernorm,
      .tie_word_embeddings = !options.untie_embeddings_and_output_weights,
      .attention_dropout = options.attention_dropout,
      .hidden_dropout = options.hidden_dropout,
      .init_std = options.init_method_std,
      .output_init_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(options.num_layers)),
  };
  TORCH_CHECK(config.intermediate_size > 0, "--ffn-hidden-size must be positive, got ", config.intermediate_size,
              ": with --swiglu its default is int(4 h * 2 / 3 / 64) * 64");
  const auto turning =
      static_cast<int64_t>(static_cast<double>(config.head_dim) * config.rotary.fraction);
  TORCH_CHECK(config.positions != PositionKind::kRotary || (turning > 0 && turning % 2 == 0 && turning <= config.head_dim),
              "rotary positions need an even number of channels a head, got ", turning, " of ", config.head_dim,
              ": change --kv-channels or --rotary-percent");
  return config;
}

DecoderConfig decoder_config(const ModelContext& context) {
  if (context.hf_dir.empty()) return decoder_config_from_options(context.options);
  auto config = decoder_config_from_hf(context.hf_dir);
  const auto problem = contradiction(config, context.explicit_flags);
  TORCH_CHECK(!problem, problem.value_or(""));
  if (context.untie_embeddings) config.tie_word_embeddings = false;
  config.init_std = context.init_method_std.value_or(config.init_std);
  return config;
}

}  // namespace megashard
