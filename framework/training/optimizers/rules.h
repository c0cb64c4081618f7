#pragma once

#include <memory>

#include "framework/training/optimizers/optimizer_options.h"
#include "framework/training/optimizers/update_rule.h"

namespace megashard {

/// Of SGD and Muon, in PyTorch's words.
inline constexpr const char* kMomentumBuffer = "momentum_buffer";

/// Keys of describe() that torch's AdamW and SGD share, with their defaults.
inline void set_common_keys(Dict& entry) {
  entry.set("maximize", false);
  entry.set("foreach", Value());
  entry.set("differentiable", false);
  entry.set("fused", Value());
}

// One rule a file.
std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_muon(const OptimizerOptions& options);

}  // namespace megashard
