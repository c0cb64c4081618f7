#include "models/config/read_decoder_config.h"
#include "models/families/model_family.h"

namespace megashard {
namespace {

/// Llama without biases; a window in config.json applies to all layers.
DecoderConfig read_mistral(const HfConfig& config) {
  auto network = read_decoder(config, {.names = class_names("Mistral"), .kv_heads = 8, .max_positions = 131072});
  read_window_of_all_layers(config, network);
  return network;
}

const RegisterFamily kMistral(
    {.model_type = "mistral", .architecture = "MistralForCausalLM", .read = read_mistral, .has_megatron_layout = true});

}  // namespace
}  // namespace megashard
