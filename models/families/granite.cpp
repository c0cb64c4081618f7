#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Llama with factors.
DecoderConfig read_granite(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Granite"), .max_positions = 2048});
  network.qkv_bias = network.attention_out_bias = config.get("attention_bias", false);
  network.mlp_bias = config.get("mlp_bias", false);
  require_no_windows(config, network);
  network.embedding_scale = config.get("embedding_multiplier", 1.0);
  network.attention_scale = config.get("attention_multiplier", 1.0);
  network.residual_scale = config.get("residual_multiplier", 1.0);
  const auto divisor = config.get("logits_scaling", 1.0);
  TORCH_CHECK(divisor != 0, config.path(), ": logits_scaling must not be 0");
  network.logit_scale = 1 / divisor;
  return network;
}

const RegisterFamily kGranite({.model_type = "granite", .architecture = "GraniteForCausalLM", .read = read_granite});

}  // namespace
}  // namespace megashard
