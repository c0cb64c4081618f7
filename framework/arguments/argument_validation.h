#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"

namespace megashard {

/// Facts about the machine and the launcher for validation.
struct RunEnvironment {
  int world_size = 1;
  int rank = 0;
  bool has_gpu = false;
  std::optional<std::string> cuda_device_max_connections{};  ///< environment variable of that name
  std::optional<std::string> nccl_algo{};
};

/// Parts of a run that a program may do without. Validation neither asks for the arguments of a missing part nor checks
/// them.
struct RunParts {
  bool training = true;  ///< gradients, and the optimizer's steps
  bool schedule = true;  ///< length of the training, learning rate, training and validation splits
  bool data = true;      ///< data sets
  bool serves = false;   ///< another process gives the data, and computes the loss
};

/// Computes derived values (marked so in the headers) and checks the rules between arguments (Megatron's
/// validate_args). Throws UsageErrors: `found`, mistakes in single flags, and each broken rule with both values, the
/// reason and the remedy. docs/arguments.md lists Megatron's rules that are not needed here.
void validate_arguments(Arguments& arguments, const RunEnvironment& environment, const DiagnosticSink& sink,
                        Mistakes found = {}, const RunParts& parts = {});

/// The part of validation for a network described by flags (--num-layers ..., not --hf-model): computes derived sizes
/// and checks the rules between them. Idempotent.
void derive_network(Arguments& arguments);

}  // namespace megashard
