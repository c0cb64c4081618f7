#include "framework/arguments/network_arguments.h"

#include <charconv>
#include <string>
#include <string_view>
#include <system_error>

#include "framework/arguments/layer_frequency.h"
#include "framework/arguments/option_group.h"
#include "framework/mistakes.h"
#include "framework/objectives/objectives.h"

namespace megashard::detail {
namespace {

using A = Arguments;
using std::to_string;

/// Rotary position embeddings rotate pairs of channels.
void check_rotary(const Arguments& arguments, Mistakes& rules) {
  rules.require(!arguments.rotary_seq_len_interpolation_factor || !arguments.use_rope_scaling,
                "--rotary-seq-len-interpolation-factor and --use-rope-scaling exclude each other; "
                "give one of them.");
  if (arguments.position_embedding_type != PositionEmbeddingType::kRope || arguments.kv_channels.value_or(0) <= 0)
    return;
  if (arguments.multi_latent_attention) return;
  const int64_t channels = *arguments.kv_channels;
  const auto turning = static_cast<int64_t>(static_cast<double>(channels) * arguments.rotary_percent);
  rules.require(turning > 0 && turning % 2 == 0, "rotary positions need an even number of channels a head, got " +
                                                     to_string(turning) + " of " + to_string(channels) +
                                                     "; change --kv-channels or --rotary-percent.");
}

void check_latent_attention(Arguments& arguments, Mistakes& rules) {
  const bool has_latents = arguments.multi_latent_attention;
  rules.require(has_latents || arguments.hf_model || arguments.rope_type != RopeType::kYarn,
                "--rope-type yarn needs --multi-latent-attention; otherwise positions are scaled by --use-rope-scaling "
                "(Llama 3) or --rotary-seq-len-interpolation-factor.");
  if (!has_latents || arguments.hf_model) return;
  if (!arguments.rope_type) arguments.rope_type = RopeType::kYarn;
  rules.require(arguments.position_embedding_type == PositionEmbeddingType::kRope,
                "--multi-latent-attention needs --position-embedding-type rope: some channels of its keys turn.");
  rules.require(arguments.qk_pos_emb_head_dim % 2 == 0, "--qk-pos-emb-head-dim " +
                                                            to_string(arguments.qk_pos_emb_head_dim) +
                                                            " must be even: positions turn pairs of channels.");
  rules.require(
      !arguments.group_query_attention,
      "--multi-latent-attention gives every head its own keys and values; leave --group-query-attention out.");
  rules.require(
      !arguments.use_rope_scaling && !arguments.rotary_seq_len_interpolation_factor && arguments.rotary_percent == 1 &&
          !arguments.rotary_interleaved,
      "--multi-latent-attention turns --qk-pos-emb-head-dim channels, scaled by --rotary-scaling-factor; leave "
      "--use-rope-scaling, --rotary-seq-len-interpolation-factor, --rotary-percent and --rotary-interleaved "
      "out.");
}

void check_lora(const Arguments& arguments, Mistakes& rules) {
  if (!arguments.lora_r) {
    rules.require(arguments.lora_target_modules.empty(),
                  "--lora-target-modules needs --lora-r, the rank of the adapters.");
    return;
  }
  rules.require(!arguments.lora_target_modules.empty(),
                "--lora-r needs --lora-target-modules, the linear layers that get adapters; for Llama and "
                "Qwen q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, or all-linear.");
  rules.require(arguments.hf_model && !arguments.from_scratch,
                "--lora-r needs --hf-model, whose weights the adapters change, without --from-scratch.");
}

}  // namespace

void add_network_options(std::vector<Option>& rows) {
  using enum OnResume;
  OptionGroup group("network size", rows, {.from_checkpoint = true});
  group.add("--num-layers", &A::num_layers, kMustMatch, "transformer layers").above(0);
  group.add("--encoder-num-layers", &A::encoder_num_layers, kReport, "another name for --num-layers")
      .above(0)
      .taken_from_checkpoint(false);
  group.add("--hidden-size", &A::hidden_size, kMustMatch, "width of the residual stream").above(0);
  group
      .add("--ffn-hidden-size", &A::ffn_hidden_size, kMustMatch,
           "width of the MLP; unset: 4 * hidden size, with --swiglu 8/3 of it in steps of 64")
      .above(0);
  group.add("--num-attention-heads", &A::num_attention_heads, kMustMatch, "query heads").above(0);
  group.add("--kv-channels", &A::kv_channels, kMustMatch, "head size; unset: hidden size / heads").above(0);
  group.add("--group-query-attention", &A::group_query_attention, kMustMatch, "fewer key/value than query heads");
  group.add("--num-query-groups", &A::num_query_groups, kMustMatch, "key/value heads with --group-query-attention")
      .above(0);
  group.add("--max-position-embeddings", &A::max_position_embeddings, kReport, "longest sequence").above(0);
  group
      .choice("--position-embedding-type", &A::position_embedding_type, kMustMatch,
              {{"learned_absolute", PositionEmbeddingType::kLearnedAbsolute},
               {"rope", PositionEmbeddingType::kRope},
               {"mrope", PositionEmbeddingType::kMrope},
               {"none", PositionEmbeddingType::kNone}},
              "how positions are encoded; mrope: only with --hf-model of a vision-language model")
      .refuse_values({"relative"}, "it belongs to T5; use rope or learned_absolute");
  group.add("--use-rotary-position-embeddings", &A::use_rotary_position_embeddings, kReport,
            "same as --position-embedding-type rope");
  group.add("--rotary-base", &A::rotary_base, kReport, "base of the rotary frequencies").above(0);
  group.add("--rotary-percent", &A::rotary_percent, kMustMatch, "part of the head that is rotated").above(0).at_most(1);
  group.add("--rotary-interleaved", &A::rotary_interleaved, kMustMatch,
            "rotate neighbouring channels of a head together, not those of its halves");
  group
      .add("--rotary-seq-len-interpolation-factor", &A::rotary_seq_len_interpolation_factor, kReport,
           "divides the positions")
      .above(0);
  group.add("--use-rope-scaling", &A::use_rope_scaling, kReport, "Llama 3's scaling of the rotary frequencies");
  group.add("--rope-scaling-factor", &A::rope_scaling_factor, kReport, "factor of --use-rope-scaling").above(0);
  group
      .add("--make-vocab-size-divisible-by", &A::make_vocab_size_divisible_by, kReport,
           "pads the vocabulary; never with --hf-model")
      .above(0);
  group.choice("--normalization", &A::normalization, kMustMatch,
               {{"LayerNorm", Normalization::kLayerNorm}, {"RMSNorm", Normalization::kRmsNorm}}, "kind of norm");
  group.add("--norm-epsilon", &A::norm_epsilon, kReport, "epsilon of the norms").alias("--layernorm-epsilon").above(0);
  group.add("--apply-layernorm-1p", &A::apply_layernorm_1p, kMustMatch,
            "norms multiply by 1 + weight; weights start at 0");
  group.add("--openai-gelu", &A::openai_gelu, kMustMatch, "GELU by tanh");
  group
      .add("--no-bias-gelu-fusion", &A::bias_gelu_fusion, kMustMatch,
           "exact GELU; otherwise with biases the tanh approximation of Megatron's fused kernel")
      .turns_off()
      .named("bias_gelu_fusion");
  group.add("--squared-relu", &A::squared_relu, kMustMatch, "squared ReLU in the MLP");
  group.add("--swiglu", &A::swiglu, kMustMatch, "gated SiLU in the MLP");
  group
      .add("--logits-at-once", &A::logits_at_once, kFree,
           "number of logits that the loss holds at a time; unset: 2^27 on a CPU, 2^28 on a GPU")
      .above(0);
  group.add("--apply-tiled-mlp", &A::apply_tiled_mlp, kReport,
            "compute each MLP in pieces of the sequence, again in backward (ROLL)");
  group.add("--tiled-num-shards", &A::tiled_num_shards, kReport, "sequence chunks per MLP, with --apply-tiled-mlp")
      .above(0);
  group.add("--lora-r", &A::lora_r, kMustMatch, "rank of LoRA adapters, which alone are trained and saved").above(0);
  group
      .add("--lora-alpha", &A::lora_alpha, kMustMatch,
           "LoRA scaling: the adapter's output is multiplied by alpha / rank")
      .above(0);
  group.add("--lora-dropout", &A::lora_dropout, kReport, "dropout on the adapter's input").at_least(0).below(1);
  group
      .add("--lora-target-modules", &A::lora_target_modules, kMustMatch,
           "linear layers with adapters, by the end of their path (q_proj ...); all-linear: all except the output's")
      .shown_as("NAME");
  group.add("--untie-embeddings-and-output-weights", &A::untie_embeddings_and_output_weights, kMustMatch,
            "separate weights for the embedding and the output layer");
  group.add("--disable-bias-linear", &A::add_bias_linear, kMustMatch, "no biases in linear layers")
      .turns_off()
      .named("add_bias_linear");
  group.add("--add-qkv-bias", &A::add_qkv_bias, kMustMatch, "biases in the query/key/value projection");
  group.add("--qk-layernorm", &A::qk_layernorm, kMustMatch, "norms on queries and keys");
  group.add("--attention-output-gate", &A::attention_output_gate, kMustMatch,
            "multiplies attention's output by a sigmoid of the token");
  group
      .choice("--attention-mask-type", &A::attention_mask_type, kReport,
              {{"causal", AttentionMaskType::kCausal}, {"general", AttentionMaskType::kGeneral}},
              "general: every latent sees all others, as the models of latents have it")
      .taken_from_checkpoint(false);
  group
      .choice("--softmax-type", &A::softmax_type, kMustMatch,
              {{"vanilla", SoftmaxType::kVanilla}, {"learnable", SoftmaxType::kLearnable}},
              "learnable: each head has a sink, the score of a key without a value")
      .refuse_values({"off-by-one"}, "a sink is learnt or there is none; use learnable or vanilla");
  group
      .add("--no-rope-freq", &A::no_rope_freq, kMustMatch,
           "layers without positions: every N-th, or 0 and 1 for each layer")
      .shown_as("N|LIST");
  group
      .add("--window-size", &A::window_size, kMustMatch, "a query sees so many keys before its own, and none behind it")
      .shown_as("LEFT,0");
  group
      .add("--window-attn-skip-freq", &A::window_attn_skip_freq, kMustMatch,
           "layers without --window-size: every N-th; or for each layer 1 with it, 0 without")
      .shown_as("N|LIST");
  group.add("--multi-latent-attention", &A::multi_latent_attention, kMustMatch,
            "queries, keys and values come from latents (DeepSeek); --qk-layernorm norms these");
  group.add("--q-lora-rank", &A::q_lora_rank, kMustMatch, "width of the queries' latent; unset: there is none")
      .above(0);
  group.add("--kv-lora-rank", &A::kv_lora_rank, kMustMatch, "width of the latent of keys and values").above(0);
  group.add("--qk-head-dim", &A::qk_head_dim, kMustMatch, "channels of a query and key without positions").above(0);
  group.add("--qk-pos-emb-head-dim", &A::qk_pos_emb_head_dim, kMustMatch, "channels of a query and key that turn")
      .above(0);
  group.add("--v-head-dim", &A::v_head_dim, kMustMatch, "channels of a value").above(0);
  group.choice("--rope-type", &A::rope_type, kMustMatch, {{"rope", RopeType::kRope}, {"yarn", RopeType::kYarn}},
               "positions of latent attention; unset: yarn");
  group
      .add("--rotary-scaling-factor", &A::rotary_scaling_factor, kReport,
           "YaRN's factor of latent attention, over 4,096 positions")
      .at_least(1);
  group.add("--mscale", &A::mscale, kReport, "YaRN: enlarges cosines and sines with the factor").at_least(0);
  group.add("--mscale-all-dim", &A::mscale_all_dim, kReport, "YaRN: enlarges scores with the factor instead")
      .at_least(0);
  group
      .add("--mtp-num-layers", &A::mtp_num_layers, kMustMatch,
           "layers that predict tokens beyond the next one (multi-token prediction), each with a loss of its own")
      .above(0);
  group
      .add("--mtp-loss-scaling-factor", &A::mtp_loss_scaling_factor, kReport,
           "coefficient of the mean of the losses of --mtp-num-layers")
      .at_least(0);
  group
      .add("--no-position-embedding", &A::add_position_embedding, kReport,
           "no learned positions; only with rope or none")
      .turns_off()
      .named("add_position_embedding");
  group.refused("--apply-residual-connection-post-layernorm", 0,
                "it belongs to BERT models, which are not part of this program; leave it out");
}

void derive_network_sizes(Arguments& arguments, Mistakes& rules) {
  const std::pair<const char*, const std::optional<int64_t>*> required[] = {
      {"--num-layers", &arguments.num_layers},
      {"--hidden-size", &arguments.hidden_size},
      {"--num-attention-heads", &arguments.num_attention_heads},
      {"--max-position-embeddings", &arguments.max_position_embeddings},
  };
  for (const auto& [flag, value] : required) {
    rules.require(value->has_value(),
                  std::string(flag) + " is missing; give it, or --hf-model DIR with a config.json.");
  }
  const int64_t hidden = arguments.hidden_size.value_or(0);
  const int64_t heads = arguments.num_attention_heads.value_or(0);
  if (hidden <= 0 || heads <= 0) return;
  if (!arguments.ffn_hidden_size) {
    constexpr int64_t kStep = 64;
    const auto gated = static_cast<int64_t>(static_cast<double>(4 * hidden) * 2 / 3 / kStep) * kStep;
    const bool enough = rules.require(!arguments.swiglu || gated > 0,
                                      "--ffn-hidden-size is missing: with --swiglu it would be 8/3 of --hidden-size " +
                                          to_string(hidden) + " in steps of 64, which is 0; give it.");
    if (enough) arguments.ffn_hidden_size = arguments.swiglu ? gated : 4 * hidden;
  }
  if (!arguments.kv_channels) {
    const bool divides = rules.require(
        hidden % heads == 0, "--hidden-size " + to_string(hidden) + " is not divisible by --num-attention-heads " +
                                 to_string(heads) + "; change one, or give the head size by --kv-channels.");
    if (divides) arguments.kv_channels = hidden / heads;
  }
}

}  // namespace megashard::detail

namespace megashard {

int64_t keys_before(const std::string& window_size) {
  int64_t before = -1;
  std::string_view text = window_size;
  if (text.starts_with('(') && text.ends_with(')')) text = text.substr(1, text.size() - 2);
  const auto read = std::from_chars(text.data(), text.data() + text.size(), before);
  text.remove_prefix(static_cast<size_t>(read.ptr - text.data()));
  require(read.ec == std::errc() && before >= 0 && (text == ",0" || text == ", 0"),
          "--window-size takes the keys before a query's own, and 0 behind it: 127,0");
  return before;
}

}  // namespace megashard

namespace megashard::detail {
namespace {

void check_layers(const Arguments& arguments, Mistakes& rules) {
  if (arguments.window_size) rules.attempt([&] { keys_before(*arguments.window_size); });
  rules.require(!arguments.window_attn_skip_freq || arguments.window_size,
                "--window-attn-skip-freq needs --window-size; give both, or leave it out.");
  for (const char* name : {"no_rope_freq", "window_size", "window_attn_skip_freq"}) {
    rules.require(!arguments.hf_model || !arguments.is_given(name),
                  find_argument(name)->flag + " does not go with --hf-model, whose config.json says it; leave it out.");
  }
  rules.require(!arguments.no_rope_freq || arguments.position_embedding_type == PositionEmbeddingType::kRope ||
                    arguments.hf_model,
                "--no-rope-freq needs --position-embedding-type rope; give it, or leave it out.");
  const bool is_plain =
      !arguments.attention_output_gate && arguments.softmax_type == SoftmaxType::kVanilla && !arguments.window_size;
  rules.require(is_plain || !arguments.multi_latent_attention,
                "--attention-output-gate, --softmax-type and --window-size do not go with --multi-latent-attention; "
                "leave them out.");
  if (!arguments.num_layers || arguments.hf_model) return;
  if (arguments.no_rope_freq)
    rules.attempt([&] { expand_layer_frequency(kNoRopeFreq, *arguments.no_rope_freq, *arguments.num_layers); });
  if (arguments.window_attn_skip_freq) {
    rules.attempt(
        [&] { expand_layer_frequency(kWindowAttnSkipFreq, *arguments.window_attn_skip_freq, *arguments.num_layers); });
  }
}

}  // namespace

void check_network(Arguments& arguments, Mistakes& rules) {
  check_layers(arguments, rules);
  check_rotary(arguments, rules);
  check_latent_attention(arguments, rules);
  check_lora(arguments, rules);
  const auto positions = arguments.position_embedding_type;
  rules.require(positions != PositionEmbeddingType::kMrope || arguments.hf_model,
                "--position-embedding-type mrope belongs to vision-language models; give one by "
                "--hf-model, or use rope.");
  rules.require(arguments.add_position_embedding || positions != PositionEmbeddingType::kLearnedAbsolute,
                "--no-position-embedding leaves learned positions out, and "
                "--position-embedding-type is learned_absolute; say rope or none there.");
  rules.require(!arguments.mtp_num_layers || positions != PositionEmbeddingType::kLearnedAbsolute || arguments.hf_model,
                "--mtp-num-layers needs --position-embedding-type rope or none.");
  rules.require(!arguments.mtp_num_layers || arguments.objective == kNextToken,
                "--mtp-num-layers predicts tokens of texts, and --objective " + arguments.objective +
                    " compares answers; leave one of them out.");
  rules.require(!arguments.is_given("mtp_loss_scaling_factor") || arguments.mtp_num_layers,
                "--mtp-loss-scaling-factor needs --mtp-num-layers; give both, or leave it out.");
  rules.require(int{arguments.swiglu} + int{arguments.squared_relu} + int{arguments.openai_gelu} <= 1,
                "--swiglu, --squared-relu and --openai-gelu exclude each other; give one.");
  if (!arguments.group_query_attention || !arguments.num_attention_heads) return;
  const int64_t heads = *arguments.num_attention_heads, groups = arguments.num_query_groups;
  rules.require(groups <= 0 || heads % groups == 0, "--num-attention-heads " + to_string(heads) +
                                                        " is not divisible by --num-query-groups " + to_string(groups) +
                                                        "; each group serves the same number of heads.");
}

}  // namespace megashard::detail
