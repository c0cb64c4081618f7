#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "framework/arguments/checkpoint_arguments.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Setting of --dist-ckpt-strictness for names that only one side has. Missing and unexpected are PyTorch's words;
/// Megatron's values call the first kind "unexpected".
struct LoadStrictness {
  enum class Handling { kRefuse, kPrint, kIgnore };
  Handling missing = Handling::kRefuse;     ///< the run has it, the checkpoint does not
  Handling unexpected = Handling::kRefuse;  ///< the checkpoint has it, the run does not
};

/// Converts one of Megatron's StrictHandling values; unset: both kinds are refused. return_* print, because a program
/// has no caller to return them to.
LoadStrictness load_strictness(const std::optional<StrictHandling>& value);

/// Throws UsageError with both lists and the remedy, or returns the lines to print.
std::vector<std::string> judge_differences(const LoadReport& report, const LoadStrictness& strictness,
                                           const std::string& folder);

/// All of its numbers; the host waits for the device.
bool is_finite(const at::Tensor& values);
/// Names in their order, the first few of them: "a, b, c and 4 more".
std::string first_names(const std::vector<std::string>& names);

/// "layers.0.weight holds NaN or infinity", "a, b, c and 4 more hold NaN or infinity", or nothing:
/// of the parameters, whichever rank has their rows. Collective.
std::string list_nonfinite_weights(const torch::nn::Module& model, const ProcessGroupPtr& group);

/// Every fp32 parameter takes the nearest values of bf16 and stays fp32 (--downcast-to-bf16).
void round_weights_to_bf16(const torch::nn::Module& model);

}  // namespace megashard
