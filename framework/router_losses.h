#pragma once

#include <cstddef>

namespace megashard {

/// Megatron's router losses, each the mean over the layers that have it, before its coefficient. Indices into
/// MultiModalModule::take_router_losses(). NaN: disabled.
enum RouterLoss : size_t { kZLoss, kLoadBalancingLoss, kSequenceBalancingLoss, kRouterLosses };

}  // namespace megashard
