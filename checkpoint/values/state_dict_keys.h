#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

// The keys of a training's state dict, nested as PyTorch's get_state_dict does it, with Megatron's
// names of the parts. torch_dist stores some under other keys (torch_dist_keys.h).
//   model.<weight>                        weights
//   optimizer.state.<weight>.<buffer>     what the optimizer keeps of each
//   optimizer.param_groups, args, ...     plain values

inline constexpr std::string_view kModelPrefix = "model.";
inline constexpr std::string_view kOptimizerPrefix = "optimizer.";
inline constexpr std::string_view kOptimizerStatePrefix = "optimizer.state.";

// Names of plain values.
inline constexpr const char* kArgsKey = "args";  ///< a namespace
inline constexpr const char* kIterationKey = "iteration";
inline constexpr const char* kCheckpointVersionKey = "checkpoint_version";
inline constexpr const char* kFlopsKey = "num_floating_point_operations_so_far";
inline constexpr const char* kSchedulerKey = "opt_param_scheduler";
inline constexpr const char* kRngStateKey = "rng_state";  ///< of ranks: "rng_state.<rank>"
inline constexpr const char* kOptimizerKey = "optimizer";
inline constexpr const char* kStateKey = "state";               ///< of the optimizer
inline constexpr const char* kParamGroupsKey = "param_groups";  ///< of the optimizer
inline constexpr const char* kParamsKey = "params";             ///< of a group: names of weights
inline constexpr const char* kGradScalerKey = "grad_scaler";    ///< of the optimizer: a dynamic loss scale

// Buffers of the optimizer that are known by name.
inline constexpr const char* kExpAvgBuffer = "exp_avg";
inline constexpr const char* kStepBuffer = "step";
inline constexpr const char* kFp32Buffer = "fp32_param";  ///< the fp32 copy of a 16-bit weight

inline constexpr double kCheckpointVersion = 3.0;  ///< Megatron's, of what is written here

std::string model_key(std::string_view weight);  ///< "model.<weight>"
bool is_model_key(std::string_view key);
bool is_optimizer_key(std::string_view key);  ///< of its state or not

/// "optimizer.state.<weight>.<buffer>"
struct OptimizerStateKey {
  std::string weight;
  std::string buffer;  ///< without a dot
};
std::string optimizer_state_key(std::string_view weight, std::string_view buffer);
/// Nothing for other keys.
std::optional<OptimizerStateKey> split_optimizer_state_key(std::string_view key);

/// Further keys of tensors whose bytes are stored once, under another key: {key, that one}. PyTorch
/// finds a shared weight under each of its keys; Megatron stores it under one.
using TiedKeys = std::vector<std::pair<std::string, std::string>>;

/// By-products of Megatron's and TransformerEngine's modules, which hold no state of the training.
bool is_extra_state(std::string_view key);

/// Where a tensor's key belongs in the nested state dict: model.<weight>,
/// optimizer.state.<weight>.<buffer>, or itself.
std::vector<Value> tensor_path(const std::string& key);

}  // namespace megashard
