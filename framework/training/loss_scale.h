#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"
#include "framework/arguments/arguments.h"
#include "parallel/fsdp/grad_scaler.h"

namespace megashard {

/// How validated arguments scale losses; nothing: not at all. --loss-scale is constant; gradients that pass through
/// fp16 are scaled dynamically without it.
std::optional<GradScaler::Options> scaler_options(const Arguments& arguments);
/// The scaler of these trained parameters, on their device; null: losses are not scaled.
std::unique_ptr<GradScaler> make_scaler(const std::optional<GradScaler::Options>& options,
                                        const std::vector<at::Tensor>& parameters);

// Checkpoints keep a dynamic scale as Megatron's do, under optimizer.grad_scaler: scale (a tensor [1]), growth_tracker
// and hysteresis_tracker. `scaler`: null where losses are not scaled.

/// Adds it to what is saved of the optimizer.
void save_loss_scale(const GradScaler* scaler, Dict& optimizer);
/// The state that the scaler is to go on with; nothing: it keeps its own. What of it differs between the run and the
/// checkpoint's optimizer (null: it has none) becomes a line. Throws an error for what is no such state.
std::optional<GradScaler::State> loss_scale_to_load(const GradScaler* scaler, const Value* optimizer,
                                                    std::vector<std::string>& lines);

}  // namespace megashard
