#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// LayerNorms, biases, and an MLP without a gate.
DecoderConfig read_starcoder2(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Starcoder2"),
                                       .kv_heads = 2,
                                       .max_positions = 4096,
                                       .norm_eps = 1e-5,
                                       .norm_eps_key = "norm_epsilon",
                                       .activation = "gelu_pytorch_tanh",
                                       .tie_word_embeddings = true});
  network.names.norm = "LayerNorm";
  network.norm = NormKind::kLayerNorm;
  network.gated_mlp = false;
  network.qkv_bias = network.attention_out_bias = network.mlp_bias = config.get("use_bias", true);
  network.hidden_dropout = config.get("embedding_dropout", 0.0);
  network.sliding_window = read_sliding_window(config, 0);
  slide_all_or_no_layers(config, network);
  return network;
}

LayerSpec starcoder2_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  layer.dropout = config.get("residual_dropout", 0.0);
  return layer;
}

const RegisterFamily kStarcoder2({.model_type = "starcoder2",
                                  .architecture = "Starcoder2ForCausalLM",
                                  .read = read_starcoder2,
                                  .layer = starcoder2_layer,
                                  .weight_files = {.renamings = {{"mlp.up_proj.", "mlp.c_fc."},
                                                                 {"mlp.down_proj.", "mlp.c_proj."}}}});

}  // namespace
}  // namespace megashard
