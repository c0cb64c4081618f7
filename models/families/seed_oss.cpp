#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

DecoderConfig read_seed_oss(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("SeedOss"),
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .max_positions = 524288,
                                       .attention_dropout = 0.1,
                                       .pad_token_id = 1});
  network.qkv_bias = config.get("attention_bias", true);
  network.attention_out_bias = config.get("attention_out_bias", false);
  network.mlp_bias = config.get("mlp_bias", false);
  require_no_windows(config, network);
  return network;
}

/// Drops outputs of branches, but no embeddings.
LayerSpec seed_oss_layer(const HfConfig& config, const DecoderConfig& network, int64_t index) {
  auto layer = decoder_layer(network, index);
  layer.dropout = config.get("residual_dropout", 0.1);
  return layer;
}

const RegisterFamily kSeedOss(
    {.model_type = "seed_oss", .architecture = "SeedOssForCausalLM", .read = read_seed_oss, .layer = seed_oss_layer});

}  // namespace
}  // namespace megashard
