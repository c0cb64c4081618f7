#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "framework/model_output.h"
#include "models/config/decoder_config.h"
#include "models/layers/part.h"

namespace megashard {

/// transformers' load_balancing_loss_func of all layers together: `balance` [layers, 2, B, experts] of LayerOutput,
/// summed over the ranks that share the sequences. A scalar; experts_per_token where all experts are used equally, 0
/// without tokens.
at::Tensor load_balancing_loss(const at::Tensor& balance, int64_t experts_per_token);

/// The losses of the routers of several layers that `config` asks for: transformers' above, and Megatron's of each
/// layer by itself (moe_utils.py: switch_load_balancing_loss_func, z_loss_func), whose metrics are means over the
/// layers. `states`: summed over the ranks that share the sequences.
std::vector<AuxTerm> router_losses(const LayerOutput& states, const MoeConfig& config);

}  // namespace megashard
