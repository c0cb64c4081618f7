#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "framework/arguments/arguments.h"
#include "framework/diagnostics.h"
#include "framework/mistakes.h"

namespace megashard {

/// What validation needs to know of the machine and the launcher.
struct RunEnvironment {
  int world_size = 1;
  int rank = 0;
  bool has_gpu = false;
  std::optional<std::string> cuda_device_max_connections{};  ///< environment variables of these names
  std::optional<std::string> nccl_algo{};
};

/// Fills derived values (marked so in the headers) and checks every rule between arguments
/// (validate_args of Megatron). Throws UsageErrors: `found`, mistakes in single flags, and each
/// rule that is broken, with both values, the reason and the remedy. docs/arguments.md lists
/// Megatron's rules that are not needed here.
void validate_arguments(Arguments& arguments, const RunEnvironment& environment, const DiagnosticSink& sink,
                        Mistakes found = {});

/// The step of it for a network that flags describe (--num-layers ..., not --hf-model): fills the
/// sizes that follow from others and checks the rules between them. Twice is as once.
void derive_network(Arguments& arguments);

}  // namespace megashard
