// Gemma 4's text model: dense, with experts beside an MLP, or with inputs of each layer and shared keys and values.
#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"
#include "models/layers/layer_inputs.h"
#include "models/layers/mlp.h"
#include "models/moe/moe.h"
#include "models/moe/normed_router.h"

namespace megashard {
namespace {

/// Layers with a window have other heads and positions than those without.
void read_layers(const HfConfig& config, DecoderConfig& network) {
  network.sliding_window = read_positive(config, "sliding_window", 512);
  network.sliding_layers = read_sliding_layers(config, network, [](int64_t layer) { return (layer + 1) % 6 != 0; });
  std::erase(network.sliding_layers, network.num_layers - 1);  // transformers gives the last layer no window
  network.values_are_keys = config.get("attention_k_eq_v", false);
  const auto kv_heads = network.values_are_keys ? config.get_or_null("num_global_key_value_heads", network.num_kv_heads)
                                                : network.num_kv_heads;
  network.global_heads = read_global_heads(config, network, {read_positive(config, "global_head_dim", 512), kv_heads});
  network.rotary = read_rotary_of(config, "full_attention",
                                  {.kind = RotaryConfig::Kind::kProportional, .theta = 1e6, .fraction = 0.25});
  network.rotary.head_dim = network.global_heads->head_dim;
  network.sliding_rotary = read_rotary_of(config, "sliding_attention", {.theta = 1e4});
  network.shared_kv_layers = config.get<int64_t>("num_kv_shared_layers", 0);
  for (int64_t layer = 0; layer < network.num_layers; ++layer)
    TORCH_CHECK(network.shared_kv_layers >= 0 && (!network.takes_keys(layer) || network.giver_of_keys(layer) >= 0),
                config.path(), ": num_kv_shared_layers ", network.shared_kv_layers,
                " must be at least 0, and leave each of layer_types a layer with keys of its own");
}

DecoderConfig read_gemma4(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Gemma4Text"),
                                       .kv_heads = 4,
                                       .head_dim = 256,
                                       .max_positions = 131072,
                                       .intermediate_size = 9216,
                                       .rotates_by_layer = true,
                                       .activation_key = "hidden_activation",
                                       .activation = "gelu_pytorch_tanh",
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  network.names.model = "Gemma4ForCausalLM";
  for (const char* key : {"use_bidirectional_attention", "attention_chunk_size"})
    config.require_computed(config.find(key) == nullptr, key, " is not supported; take a model without it");
  network.norm_in_fp32 = network.sandwich_norms = network.layer_scalars = true;
  network.embedding_scale = std::sqrt(static_cast<double>(network.hidden_size));
  network.logit_softcap = config.get_or_null("final_logit_softcapping", 0.0);
  network.qk_norm = network.v_norm = true;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.attention_scale = 1;
  read_layers(config, network);
  network.layer_inputs = {.size = config.get_or_null<int64_t>("hidden_size_per_layer_input", 256),
                          .vocab_size = read_positive(config, "vocab_size_per_layer_input", 262144)};
  if (!config.get("enable_moe_block", false)) return network;
  for (const char* key : {"num_experts", "top_k_experts", "moe_intermediate_size"})
    TORCH_CHECK(config.find(key) != nullptr, config.path(), ": enable_moe_block needs ", key);
  network.moe = {.num_experts = read_positive(config, "num_experts", 0),
                 .experts_per_token = read_positive(config, "top_k_experts", 0),
                 .intermediate_size = read_positive(config, "moe_intermediate_size", 0)};
  TORCH_CHECK(network.moe.experts_per_token <= network.moe.num_experts, config.path(),
              ": top_k_experts must not be more than num_experts ", network.moe.num_experts);
  network.names.moe = "Gemma4TextMoe";
  return network;
}

/// The MLP and the experts side by side: norms around each, and the router without one.
Branch experts_beside_mlp(const DecoderConfig& network, Branch branch, const MlpSpec& mlp) {
  const auto norm = [&](const char* name) { return NamedNorm{name, hidden_norm(network)}; };
  auto without_weight = hidden_norm(network);
  without_weight.weight = false;
  auto spec = moe_of(network, normed_router("Gemma4TextRouter", std::move(without_weight)));
  spec.before = norm("pre_feedforward_layernorm_2");
  spec.after = norm("post_feedforward_layernorm_2");
  spec.shared = {.name = "mlp",
                 .mlp = mlp,
                 .before = norm("pre_feedforward_layernorm"),
                 .after = norm("post_feedforward_layernorm_1")};
  branch.name = "feed_forward";
  branch.part = experts_part(std::move(spec));
  branch.before.reset();
  return branch;
}

LayerSpec gemma4_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto dense = network;
  if (config.get("use_double_wide_mlp", false) && network.takes_keys(index)) dense.intermediate_size *= 2;
  dense.moe = {};
  auto layer = decoder_layer(dense, index);
  if (network.moe.num_experts > 0)
    layer.branches[1] = experts_beside_mlp(network, layer.branches[1], mlp_of(dense, dense.intermediate_size));
  if (const int64_t size = network.layer_inputs.size; size > 0)
    layer.branches.push_back({.name = "per_layer_input",
                              .part = layer_input_part({.class_name = "Gemma4LayerInput",
                                                        .hidden_size = network.hidden_size,
                                                        .size = size,
                                                        .layer = index,
                                                        .activation = network.activation}),
                              .after = NamedNorm{"post_per_layer_input_norm", hidden_norm(network)}});
  for (const std::string module : {"per_layer_input_gate.", "per_layer_projection."})
    layer.renamings.push_back({"per_layer_input." + module, module});
  if (network.moe.num_experts == 0) return layer;
  for (const std::string module :
       {"mlp.", "router.", "experts.", "pre_feedforward_layernorm.", "pre_feedforward_layernorm_2.",
        "post_feedforward_layernorm_1.", "post_feedforward_layernorm_2."})
    layer.renamings.push_back({"feed_forward." + module, module});
  return layer;
}

const RegisterFamily kGemma4({.model_type = "gemma4_text",
                              .architecture = "Gemma4ForCausalLM",
                              .read = read_gemma4,
                              .layer = gemma4_layer,
                              .weight_files = {.experts = {.form = ExpertFiles::Form::kPacked}}});

}  // namespace
}  // namespace megashard
