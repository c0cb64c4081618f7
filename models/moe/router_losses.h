#pragma once

#include <ATen/core/Tensor.h>

#include "models/moe/moe.h"

namespace megashard {

/// transformers' load_balancing_loss_func of all layers together: `balance` [layers, 2, B, experts] of RoutedStates,
/// summed over the ranks that share the sequences. A scalar; experts_per_token where all experts are used alike, 0
/// without tokens.
at::Tensor load_balancing_loss(const at::Tensor& balance, int64_t experts_per_token);

/// Megatron's (moe_utils.py: switch_load_balancing_loss_func, z_loss_func), of each layer by itself.
struct MegatronRouterLosses {
  at::Tensor added;  ///< a scalar: the losses of all layers, times their coefficients
  at::Tensor told;   ///< [kRouterLosses] fp64, without a gradient: router_losses.h
};
/// `states`: of several layers, summed over the ranks that share the sequences.
MegatronRouterLosses megatron_router_losses(const RoutedStates& states, const MoeConfig& config);

}  // namespace megashard
