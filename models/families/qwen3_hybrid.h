#pragma once

#include "models/config/read_decoder_config.h"
#include "models/network/network.h"

namespace megashard {

// Shared by Qwen3-Next and Qwen3.5: three layers of the gated delta rule to one of attention.

DecoderConfig read_hybrid(const HfConfig& config, DecoderDefaults defaults);
/// Reads the experts, and a gated one for all tokens.
MoeConfig read_gated_experts(const HfConfig& config, const MoeDefaults& defaults);
/// Layer `index`; `packed`: see GatedDeltaNetSpec.
LayerSpec hybrid_layer(const HfConfig& config, const DecoderConfig& network, int64_t index, bool packed);

}  // namespace megashard
