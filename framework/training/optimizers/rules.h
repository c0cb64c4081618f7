#pragma once

#include <memory>

#include "framework/training/optimizers/optimizer_options.h"
#include "framework/training/optimizers/update_rule.h"

namespace megashard {

/// Of SGD and Muon, in PyTorch's words.
inline constexpr const char* kMomentumBuffer = "momentum_buffer";

// One rule a file.
std::unique_ptr<UpdateRule> make_adamw(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_sgd(const OptimizerOptions& options);
std::unique_ptr<UpdateRule> make_muon(const OptimizerOptions& options);

}  // namespace megashard
