#include "models/model_config.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "framework/arguments/argument_table.h"
#include "framework/arguments/argument_validation.h"
#include "framework/arguments/layer_frequency.h"
#include "framework/objectives/objectives.h"
#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"
#include "models/network_arguments.h"

namespace megashard {
namespace {

Activation activation_of(const Arguments& arguments) {
  if (arguments.swiglu) return Activation::kSilu;
  if (arguments.squared_relu) return Activation::kSquaredRelu;
  // The kernel that Megatron fuses with a bias computes GELU by tanh.
  const bool fused = arguments.bias_gelu_fusion && arguments.add_bias_linear;
  return arguments.openai_gelu || fused ? Activation::kGeluTanh : Activation::kGelu;
}

NormKind norm_of(const Arguments& arguments) {
  switch (arguments.normalization) {
    case Normalization::kRmsNorm:
      return NormKind::kRmsNorm;
    case Normalization::kLayerNorm:
      break;
  }
  return NormKind::kLayerNorm;
}

PositionKind positions_of(const Arguments& arguments) {
  switch (arguments.position_embedding_type) {
    case PositionEmbeddingType::kLearnedAbsolute:
      return PositionKind::kLearned;
    case PositionEmbeddingType::kRope:
      return PositionKind::kRotary;
    case PositionEmbeddingType::kNone:
      return PositionKind::kNone;
    case PositionEmbeddingType::kMrope:
      break;
  }
  TORCH_CHECK_VALUE(false, "--position-embedding-type mrope belongs to vision-language models, which --hf-model gives; "
                           "use rope");
}

RotaryConfig rotary_of(const Arguments& arguments) {
  RotaryConfig rotary{.theta = static_cast<double>(arguments.rotary_base),
                      .fraction = arguments.rotary_percent,
                      .interleaved = arguments.rotary_interleaved};
  if (arguments.rotary_seq_len_interpolation_factor) {
    rotary.kind = RotaryConfig::Kind::kLinear;
    rotary.factor = static_cast<double>(*arguments.rotary_seq_len_interpolation_factor);
  } else if (arguments.use_rope_scaling) {
    rotary.kind = RotaryConfig::Kind::kLlama3;
    rotary.factor = arguments.rope_scaling_factor;
  }
  return rotary;
}

/// Experts of Megatron's flags; none without --num-experts.
MoeConfig moe_of(const Arguments& arguments) {
  if (!arguments.num_experts) return {};
  const bool by_sigmoid = arguments.moe_router_score_function == RouterScoreFunction::kSigmoid;
  const bool before_choice = arguments.moe_router_pre_softmax;
  MoeConfig moe{
      .num_experts = *arguments.num_experts,
      .experts_per_token = arguments.moe_router_topk,
      .intermediate_size = *arguments.moe_ffn_hidden_size,
      .router = {.score = by_sigmoid      ? RouterConfig::Score::kSigmoid
                          : before_choice ? RouterConfig::Score::kSoftmax
                                          : RouterConfig::Score::kLogit,
                 .in_fp32 = arguments.moe_router_dtype == RouterDtype::kFp32,
                 .corrects_choice = arguments.moe_router_enable_expert_bias,
                 .normalise_weights = by_sigmoid && arguments.moe_router_topk > 1,
                 .normalise_eps = 1e-20,
                 .scale = arguments.moe_router_topk_scaling_factor.value_or(1),
                 .groups = arguments.moe_router_num_groups.value_or(1),
                 .chosen_groups = arguments.moe_router_group_topk.value_or(1)},
      .shared = {.intermediate_size = arguments.moe_shared_expert_intermediate_size.value_or(0),
                 .gated = arguments.moe_shared_expert_gate,
                 .name = "shared_experts"},
  };
  moe.latent_size = arguments.moe_latent_size.value_or(0);
  moe.router.best_of_group = moe.experts_per_token / moe.router.chosen_groups;
  const auto sparse = expand_layer_frequency(kMoeLayerFreq, arguments.moe_layer_freq, *arguments.num_layers);
  moe.dense_layers =
      layers_where(*arguments.num_layers, [&](int64_t layer) { return !sparse[static_cast<size_t>(layer)]; });
  return moe;
}

/// Multi-latent attention by Megatron's flags: head_dim becomes the channels that turn.
void take_latent_attention(DecoderConfig& config, const Arguments& arguments) {
  if (!arguments.multi_latent_attention) return;
  config.latent = {.query_rank = arguments.q_lora_rank.value_or(0),
                   .key_rank = arguments.kv_lora_rank,
                   .plain_dim = arguments.qk_head_dim,
                   .value_dim = arguments.v_head_dim};
  config.latent->norm_eps = arguments.qk_layernorm ? std::optional(arguments.norm_epsilon) : std::nullopt;
  config.head_dim = arguments.qk_pos_emb_head_dim;
  config.qk_norm = config.qkv_bias = false;
  auto& rotary = config.rotary;
  rotary.interleaved = true;
  rotary.factor = arguments.rotary_scaling_factor;
  rotary.mscale_all_dim = arguments.mscale_all_dim;
  if (arguments.rope_type != RopeType::kYarn) return;
  rotary.kind = RotaryConfig::Kind::kYarn;
  rotary.original_max_positions = 4096;
  rotary.magnitude =
      yarn_mscale(rotary.factor, arguments.mscale) / yarn_mscale(rotary.factor, arguments.mscale_all_dim);
}

/// Layers with a window, and those without positions.
void take_layers(DecoderConfig& config, const Arguments& arguments) {
  const auto selected = [&](const LayerFlag& flag, const std::optional<std::string>& frequency) {
    const auto marks = expand_layer_frequency(flag, *frequency, config.num_layers);
    return layers_where(config.num_layers, [&](int64_t layer) { return bool{marks[static_cast<size_t>(layer)]}; });
  };
  if (arguments.no_rope_freq) config.unrotated_layers = selected(kNoRopeFreq, arguments.no_rope_freq);
  if (!arguments.window_size) return;
  config.sliding_window = keys_before(*arguments.window_size) + 1;
  config.sliding_layers = arguments.window_attn_skip_freq
                              ? selected(kWindowAttnSkipFreq, arguments.window_attn_skip_freq)
                              : layers_where(config.num_layers, [](int64_t) { return true; });
}

void check_ranks_divide(const Network& network, const Arguments& arguments) {
  const int64_t ranks = arguments.tensor_model_parallel_size;
  if (ranks == 1) return;
  const std::string flag = "--tensor-model-parallel-size " + std::to_string(ranks);
  Mistakes mistakes;
  std::set<std::pair<int64_t, std::string>> seen;
  const auto must_divide = [&](int64_t number, const char* what) {
    if (!seen.emplace(number, what).second) return;
    mistakes.require(number % ranks == 0, flag + " does not divide the model's " + std::to_string(number) + " " + what +
                                              "; choose a number that does, or leave it out.");
  };
  for_each_part(network, [&](const PartSpec& part) {
    part.check_tensor_ranks(network.config.names.model);
    for (const auto& each : part.sizes_over_ranks()) must_divide(each.size, each.what);
  });
  must_divide(network.config.vocab_size, "tokens of the vocabulary");
  mistakes.require(!arguments.lora_r, flag + " does not go with --lora-r: adapters are not cut over ranks; leave one "
                                             "of them out.");
  mistakes.require(!arguments.sequence_parallel || !arguments.apply_tiled_mlp,
                   "--sequence-parallel does not go with --apply-tiled-mlp: both cut the sequence of an MLP; leave one "
                   "of them out.");
  mistakes.throw_if_any();
}

/// Throws for what a model with the head `score` does not go with.
void check_score_head(const Network& network, const Arguments& arguments) {
  if (!network.config.score_head) return;
  constexpr const char* kHead = "a model whose head is `score` (--objective reward or value, or a classifier's "
                                "config.json)";
  Mistakes mistakes;
  mistakes.require(network.encoder == nullptr,
                   std::string(kHead) + " sees no pictures; give the config.json of a text model.");
  mistakes.require(arguments.tensor_model_parallel_size == 1,
                   std::string(kHead) + " is not cut over ranks; leave out --tensor-model-parallel-size.");
  mistakes.require(!arguments.lora_r,
                   std::string(kHead) + " has a new head, which adapters would leave as it is; leave out --lora-r.");
  mistakes.throw_if_any();
}

/// True if the loss is a function of values instead of the tokens' losses.
bool needs_score_head(const Arguments& arguments) {
  return make_objective(arguments.objective, arguments.objective_options)->needs().values;
}

/// How Megatron's flags balance experts; its loss takes the place of config.json's.
void take_balance(MoeConfig& moe, const Arguments& arguments) {
  const auto type = arguments.moe_router_load_balancing_type;
  const double balance = type == RouterBalance::kNone ? 0 : arguments.moe_aux_loss_coeff;
  const double z_loss = arguments.moe_z_loss_coeff.value_or(0);
  require(moe.num_experts > 0 || (balance == 0 && z_loss == 0),
          std::string(balance != 0 ? "--moe-aux-loss-coeff" : "--moe-z-loss-coeff") +
              " needs a model with experts, and this one has none; leave it out");
  if (replaces_balance_of_config(arguments)) moe.aux_loss_coef = 0;
  moe.balance_coef = balance;
  moe.balances_sequences = type == RouterBalance::kSequence;
  moe.z_loss_coef = z_loss;
  if (!arguments.moe_router_enable_expert_bias) return;
  require(moe.router.corrects_choice,
          "--moe-router-enable-expert-bias needs a model whose routers choose by a bias (e_score_correction_bias), and "
          "this one has none; leave it out");
  moe.router.bias_update_rate = arguments.moe_router_bias_update_rate;
}

PredictionConfig prediction_of(const Arguments& arguments) {
  return {.depth = arguments.mtp_num_layers.value_or(0), .loss_scale = arguments.mtp_loss_scaling_factor};
}

void share_and_balance_experts(MoeConfig& moe, const Arguments& arguments) {
  const int64_t parts = arguments.expert_model_parallel_size;
  const std::string flag = "--expert-model-parallel-size " + std::to_string(parts);
  require(parts == 1 || moe.num_experts > 0, flag + " needs a model with experts, and this one has none; leave it out");
  require(moe.num_experts % parts == 0, flag + " does not divide the " + std::to_string(moe.num_experts) +
                                            " experts of the model; choose a number that does, or leave it out");
  take_balance(moe, arguments);
}

/// What flags change of a network that config.json describes.
void apply_flags(DecoderConfig& config, const Arguments& arguments) {
  share_and_balance_experts(config.moe, arguments);
  Mistakes mistakes;
  for (const auto& each : contradictions(config, arguments)) mistakes.add(each);
  mistakes.throw_if_any();
  if (arguments.is_given("init_method_std")) config.init_std = arguments.init_method_std;
  config.prediction = prediction_of(arguments);
  config.score_head |= needs_score_head(arguments);
}

}  // namespace

bool replaces_balance_of_config(const Arguments& arguments) {
  return arguments.is_given("moe_aux_loss_coeff") || arguments.moe_router_load_balancing_type == RouterBalance::kNone;
}

DecoderConfig decoder_config_from_flags(const Arguments& given) {
  Arguments arguments = given;
  derive_network(arguments);
  TORCH_CHECK(arguments.padded_vocab_size.value_or(0) > 0,
              "the vocabulary size (--vocab-size, or the tokenizer's) must be given and positive (or take the network "
              "from a Hugging Face directory by --hf-model)");
  const int64_t layers = *arguments.num_layers;
  const int64_t heads = *arguments.num_attention_heads;

  DecoderConfig config{
      .names = {.norm = choice_name("normalization", arguments.normalization),
                .rotary = "RotaryEmbedding",
                .attention = "SelfAttention",
                .mlp = "MLP",
                .layer = "TransformerLayer",
                .decoder = "TransformerBlock",
                .model = "GPTModel",
                .moe = "MoELayer",
                .experts = "GroupedMLP",
                .router = "TopKRouter"},
      .vocab_size = *arguments.padded_vocab_size,
      .hidden_size = *arguments.hidden_size,
      .intermediate_size = *arguments.ffn_hidden_size,
      .num_layers = layers,
      .num_heads = heads,
      .num_kv_heads = arguments.group_query_attention ? arguments.num_query_groups : heads,
      .head_dim = *arguments.kv_channels,
      .max_positions = *arguments.max_position_embeddings,
      .norm = norm_of(arguments),
      .norm_eps = arguments.norm_epsilon,
      .zero_centered_norm = arguments.apply_layernorm_1p,
      .activation = activation_of(arguments),
      .gated_mlp = arguments.swiglu,
      .positions = positions_of(arguments),
      .rotary = rotary_of(arguments),
      .qkv_bias = arguments.add_bias_linear || arguments.add_qkv_bias,
      .attention_out_bias = arguments.add_bias_linear,
      .mlp_bias = arguments.add_bias_linear,
      .attention_gate = arguments.attention_output_gate,
      .attention_sinks = arguments.softmax_type == SoftmaxType::kLearnable,
      .qk_norm = arguments.qk_layernorm,
      .tie_word_embeddings = !arguments.untie_embeddings_and_output_weights,
      .attention_dropout = arguments.attention_dropout,
      .hidden_dropout = arguments.hidden_dropout,
      .init_std = arguments.init_method_std,
      .output_init_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(layers)),
      .moe = moe_of(arguments),
      .prediction = prediction_of(arguments),
  };
  take_latent_attention(config, arguments);
  take_layers(config, arguments);
  share_and_balance_experts(config.moe, arguments);
  config.score_head = needs_score_head(arguments);
  return config;
}

Network network_of(const Arguments& arguments) {
  if (arguments.hf_model) return network_of(arguments, HfConfig::of_model(*arguments.hf_model));
  auto network = decoder_network(decoder_config_from_flags(arguments));
  check_ranks_divide(network, arguments);
  check_score_head(network, arguments);
  return network;
}

Network network_of(const Arguments& arguments, const HfConfig& config) {
  auto network = network_from_hf(config, [&](DecoderConfig& decoder) { apply_flags(decoder, arguments); });
  check_ranks_divide(network, arguments);
  check_score_head(network, arguments);
  return network;
}

bool is_of_plugin(const Arguments& arguments, const HfConfig& config) {
  return arguments.is_own_model() && find_family(config.get_or_null<std::string>("model_type", "")) == nullptr;
}

DecoderConfig decoder_config(const Arguments& arguments) { return network_of(arguments).config; }

BuildContext build_context(const Arguments& arguments) {
  const int64_t tensor_ranks = arguments.tensor_model_parallel_size,
                expert_ranks = arguments.expert_model_parallel_size;
  BuildContext context{
      .experts = {.ranks = expert_ranks, .rank = arguments.rank / tensor_ranks % expert_ranks},
      .mlp_tiles = arguments.apply_tiled_mlp ? arguments.tiled_num_shards : 1,
      .logits_at_once = arguments.logits_at_once,
  };
  if (tensor_ranks > 1)
    context.tensor_parallel =
        std::make_shared<TensorParallelRanks>(tensor_ranks, arguments.rank % tensor_ranks, arguments.sequence_parallel);
  return context;
}

}  // namespace megashard
