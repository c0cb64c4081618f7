#include "framework/arguments/activation_plan.h"

#include "framework/arguments/arguments.h"

namespace megashard {

ActivationPlan activation_plan(const Arguments& arguments) {
  ActivationPlan plan;
  if (arguments.recompute_granularity == RecomputeGranularity::kFull) {
    plan.recompute = {"layer"};
    if (arguments.recompute_method == RecomputeMethod::kBlock) plan.recompute_layers = arguments.recompute_num_layers;
  } else if (arguments.recompute_granularity) {
    plan.recompute = arguments.recompute_modules;
  }
  plan.offload = arguments.offload_modules;
  if (arguments.cpu_offloading_num_layers > 0) {
    plan.offload = {"layer"};
    plan.offload_layers = arguments.cpu_offloading_num_layers;
  }
  plan.min_offloaded_elements = arguments.min_offloaded_tensor_size;
  return plan;
}

}  // namespace megashard
