#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/activation_plan.h"
#include "framework/diagnostics.h"

namespace megashard {

struct Arguments;
struct Option;
class Mistakes;

enum class RecomputeGranularity { kFull, kSelective };
enum class RecomputeMethod { kUniform, kBlock };

/// What is kept between forward and backward: recompute and activation offload.
struct ActivationArguments {
  bool recompute_activations = false;                         // sets recompute_granularity to selective
  std::optional<RecomputeGranularity> recompute_granularity;  // (derived) selective with recompute_activations
  std::optional<RecomputeMethod> recompute_method;            // with granularity full
  std::optional<int64_t> recompute_num_layers;                // with granularity full
  std::vector<std::string> recompute_modules;                 // (derived) core_attn with selective
  int64_t cpu_offloading_num_layers = 0;
  bool fine_grained_activation_offloading = false;
  std::vector<std::string> offload_modules;
  int64_t min_offloaded_tensor_size = kMinOffloadedElements;
};

namespace detail {

/// Adds the rows of these options, in the order of the help.
void add_activation_options(std::vector<Option>& rows);
/// Checks and derives recompute and offload flags as Megatron's TransformerConfig does.
void validate_activations(Arguments& arguments, const DiagnosticSink& sink, Mistakes& rules);

}  // namespace detail

}  // namespace megashard
