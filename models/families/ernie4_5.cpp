#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_ernie4_5(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Ernie4_5"),
                                       .kv_heads = 2,
                                       .head_dim = config.is_null("head_dim") ? 0 : 128,
                                       .max_positions = 131072,
                                       .norm_eps = 1e-5,
                                       .rotary = {.theta = 500000, .interleaved = true},
                                       .tie_word_embeddings = true,
                                       .pad_token_id = 0});
  network.qkv_bias = network.attention_out_bias = network.mlp_bias = config.get("use_bias", false);
  config.require_computed(network.attention_dropout == 0, "attention_dropout ", network.attention_dropout,
                          ": this family has none; take it out");
  require_no_windows(config, network);
  return network;
}

const RegisterFamily kErnie45({.model_type = "ernie4_5", .architecture = "Ernie4_5ForCausalLM", .read = read_ernie4_5});

}  // namespace
}  // namespace megashard
