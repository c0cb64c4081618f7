#pragma once

#include <ATen/Context.h>

#include "framework/modules/weight_init_mixin.h"

namespace megashard::testing {

/// Initialises weights with a separate generator. Ranks that are threads share the default one, and the simulated
/// device borrows it for operators that may draw random numbers.
inline void init_weights(WeightInitMixin& model, uint64_t seed) {
  at::Generator own = at::globalContext().defaultGenerator(at::kCPU).clone();
  own.set_current_seed(seed);
  model.weight_init().generator = own;
  model.init_weights();
}

}  // namespace megashard::testing
