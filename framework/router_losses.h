#pragma once

#include <cstddef>

namespace megashard {

/// Megatron's losses of the routers of a model with experts, each as the mean over the layers that have some, before
/// its coefficient: places in MultiModalModule::take_router_losses(). NaN: not asked for.
enum RouterLoss : size_t { kZLoss, kLoadBalancingLoss, kSequenceBalancingLoss, kRouterLosses };

}  // namespace megashard
