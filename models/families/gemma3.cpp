#include <cmath>
#include <tuple>

#include "models/config/read_decoder_config.h"
#include "models/config/read_rotary.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

void require_no_softcapping(const HfConfig& config) {
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping"})
    config.require_computed(config.find(key) == nullptr, key, " is not supported; take a model without it");
  config.require_computed(!config.get_or_null("use_bidirectional_attention", false),
                          "use_bidirectional_attention is not supported; take a causal model");
}

DecoderConfig read_gemma3(const HfConfig& config) {
  require_no_softcapping(config);
  auto network = read_decoder(config, {.names = class_names("Gemma3"),
                                       .kv_heads = 4,
                                       .head_dim = 256,
                                       .max_positions = 131072,
                                       .rotates_by_layer = true,
                                       .activation_key = "hidden_activation",
                                       .activation = "gelu_pytorch_tanh",
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  network.names.decoder = "Gemma3TextModel";
  network.qk_norm = network.zero_centered_norm = network.sandwich_norms = true;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  const auto scalar = read_positive(config, "query_pre_attn_scalar", 256);
  network.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  network.embedding_scale = std::sqrt(static_cast<double>(network.hidden_size));
  std::tie(network.rotary, network.sliding_rotary) =
      read_rotary_by_layer(config, /*full_theta=*/1e6, "rope_local_base_freq", /*sliding_theta=*/1e4, network);
  const auto pattern = read_positive(config, "sliding_window_pattern", 6);
  network.sliding_window = read_sliding_window(config, 4096);
  network.sliding_layers =
      read_sliding_layers(config, network, [pattern](int64_t layer) { return (layer + 1) % pattern != 0; });
  return network;
}

const RegisterFamily kGemma3Text({.model_type = "gemma3_text",
                                  .architecture = "Gemma3ForCausalLM",
                                  .read = read_gemma3});

}  // namespace
}  // namespace megashard
