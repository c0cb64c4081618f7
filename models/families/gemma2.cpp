#include <cmath>

#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Null: no cap.
double read_softcap(const HfConfig& config, const char* key, double fallback) {
  const auto cap = config.is_null(key) ? 0 : config.get(key, fallback);
  config.require_computed(config.is_null(key) || cap > 0, key, " ", cap, " must be positive, or null for none");
  return cap;
}

/// Gemma 3's norms; scores and logits with soft-caps; windows in every second layer.
DecoderConfig read_gemma2(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Gemma2"),
                                       .kv_heads = 4,
                                       .head_dim = 256,
                                       .max_positions = 8192,
                                       .activation_key = "hidden_activation",
                                       .activation = "gelu_pytorch_tanh",
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  config.require_computed(!config.get_or_null("use_bidirectional_attention", false),
                          "use_bidirectional_attention is not supported; take a causal model");
  TORCH_CHECK(network.hidden_size % network.num_heads == 0, config.path(), ": hidden_size ", network.hidden_size,
              " must be a multiple of num_attention_heads ", network.num_heads, ", as transformers demands");
  network.zero_centered_norm = network.sandwich_norms = true;
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  const auto scalar = read_positive(config, "query_pre_attn_scalar", 256);
  network.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  network.attention_softcap = read_softcap(config, "attn_logit_softcapping", 50);
  network.logit_softcap = read_softcap(config, "final_logit_softcapping", 30);
  network.embedding_scale = std::sqrt(static_cast<double>(network.hidden_size));
  network.sliding_window = read_sliding_window(config, 4096);
  network.sliding_layers = read_sliding_layers(config, network, [](int64_t layer) { return layer % 2 == 0; });
  return network;
}

const RegisterFamily kGemma2({.model_type = "gemma2", .architecture = "Gemma2ForCausalLM", .read = read_gemma2});

}  // namespace
}  // namespace megashard
