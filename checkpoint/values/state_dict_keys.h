#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

// Keys of a training's state dict, nested as by PyTorch's get_state_dict, with Megatron's names of the parts.
// torch_dist stores some under other keys (torch_dist_keys.h).
//   model.<weight>                        weights
//   optimizer.state.<weight>.<buffer>     optimizer state of each weight
//   optimizer.param_groups, args, ...     plain values

inline constexpr std::string_view kModelPrefix = "model.";
inline constexpr std::string_view kOptimizerPrefix = "optimizer.";
inline constexpr std::string_view kOptimizerStatePrefix = "optimizer.state.";

// Keys of plain values.
inline constexpr const char* kArgsKey = "args";  ///< a namespace
inline constexpr const char* kIterationKey = "iteration";
inline constexpr const char* kCheckpointVersionKey = "checkpoint_version";
inline constexpr const char* kFlopsKey = "num_floating_point_operations_so_far";
inline constexpr const char* kSchedulerKey = "opt_param_scheduler";
inline constexpr const char* kRngStateKey = "rng_state";  ///< one per rank: "rng_state.<rank>"
inline constexpr const char* kOptimizerKey = "optimizer";
inline constexpr const char* kStateKey = "state";               ///< in the optimizer
inline constexpr const char* kParamGroupsKey = "param_groups";  ///< in the optimizer
inline constexpr const char* kParamsKey = "params";             ///< in a param group: names of its weights
inline constexpr const char* kGradScalerKey = "grad_scaler";    ///< in the optimizer: a dynamic loss scale

// Known optimizer buffers.
inline constexpr const char* kExpAvgBuffer = "exp_avg";
inline constexpr const char* kStepBuffer = "step";
inline constexpr const char* kFp32Buffer = "fp32_param";  ///< the fp32 copy of a 16-bit weight

inline constexpr double kCheckpointVersion = 3.0;  ///< Megatron's version of checkpoints written here

std::string model_key(std::string_view weight);  ///< "model.<weight>"
bool is_model_key(std::string_view key);
bool is_optimizer_key(std::string_view key);  ///< true for all optimizer keys, not only state

/// "optimizer.state.<weight>.<buffer>"
struct OptimizerStateKey {
  std::string weight;
  std::string buffer;  ///< without a dot
};
std::string optimizer_state_key(std::string_view weight, std::string_view buffer);
/// nullopt for other keys
std::optional<OptimizerStateKey> split_optimizer_state_key(std::string_view key);

/// Additional keys of tensors that are stored once under another key: {key, stored key}. PyTorch finds a shared weight
/// under each of its keys; Megatron stores it under one.
using TiedKeys = std::vector<std::pair<std::string, std::string>>;

/// True for keys that end with "_extra_state": by-products of Megatron's and TransformerEngine's modules without
/// training state.
bool is_extra_state(std::string_view key);

/// Path of a tensor in the nested state dict: model / <weight>, optimizer / state / <weight> / <buffer>, or the key
/// itself.
std::vector<Value> tensor_path(const std::string& key);

}  // namespace megashard
