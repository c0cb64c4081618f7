#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "framework/batch.h"
#include "models/config/decoder_config.h"
#include "models/layers/part.h"

namespace megashard {

/// transformers' load_balancing_loss_func over all layers together, a scalar: experts_per_token if all experts are used
/// equally, 0 without tokens. `balance`: LayerOutput's [layers, 2, B, experts], summed over the ranks that share the
/// sequences.
at::Tensor load_balancing_loss(const at::Tensor& balance, int64_t experts_per_token);

/// The router losses that `config` asks for: transformers' above, and Megatron's for each layer separately
/// (moe_utils.py: switch_load_balancing_loss_func, z_loss_func), whose metrics are means over the layers. `states`:
/// summed over the ranks that share the sequences.
std::vector<AuxTerm> router_losses(const LayerOutput& states, const MoeConfig& config);

}  // namespace megashard
