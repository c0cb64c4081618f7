#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/activation_plan.h"
#include "framework/diagnostics.h"
#include "parallel/copies/float8_quantise.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

struct KeyNote;

/// Selects groups by class instead of by path (wrap_policy in ROLL's strategy_config). Untied embeddings are always
/// separate groups.
struct WrapPolicy {
  /// Class names of layers; unset: the model's default. Of nested matches the inner ones are used.
  std::optional<std::vector<std::string>> layer_classes;
  bool embeddings = false;  ///< reports an embedding that stays in the root because it is tied
  bool lm_output = false;   ///< wraps lm_head or output_layer, unless tied
  /// Classes of experts ("Qwen3MoeMLP"), or of the container of a block's experts ("Qwen3MoeExperts"), to wrap as
  /// groups inside their layers.
  std::vector<std::string> expert_classes{};
};

/// Selects the dimension along which parameters are sharded; 0 by default.
struct ShardDimRule {
  bool divisible = false;  ///< the first dimension divisible by the shard size, if any (ROLL)
  /// (module pattern, dimension), for all parameters with that dimension. Of several matches the last is used.
  std::vector<std::pair<std::string, int64_t>> dims{};
};

/// The file of --fsdp2-config-path (MindSpeed-MM's Fsdp2Config), with its defaults. Lists contain path patterns; see
/// module_patterns.h.
struct Fsdp2Config {
  std::optional<int> sharding_size;  ///< shard group size; unset ("auto" or null): all data parallel ranks
  std::optional<std::vector<std::string>> sub_modules_to_wrap;  ///< unset: the model's default
  std::optional<WrapPolicy> wrap_policy;                        ///< if set, replaces the patterns
  bool native_patterns = false;                                 ///< patterns of MindSpeed's native route (fsdp_plan)
  ReshardAfterForward reshard_after_forward;
  MixedPrecisionPolicy mixed_precision;  ///< every field is a key of the file
  ShardDimRule shard_placement;
  UnusedParameters unused_parameters = UnusedParameters::kZeroFill;
  std::optional<Float8Scale> fp8_all_gather;        ///< set: all-gathers matrices as float8_e4m3fn
  std::vector<std::string> fp8_all_gather_modules;  ///< empty: all except embeddings and output layers
  int reduce_scatter_max_input_buffers = 1;         ///< maximum number in flight
  bool separate_reduce_scatter_group = false;
  std::optional<GroupMemory> communication_memory;  ///< memory of the buffers; unset: the allocator's
  bool offload_to_cpu = false;
  bool pin_memory = true;  ///< only with offload_to_cpu
  int num_to_forward_prefetch = 0;
  int num_to_backward_prefetch = 0;
  std::vector<std::string> ignored_modules;
  bool ignored_modules_replicated = false;  ///< all-reduces their gradients
  std::vector<std::string> recompute_modules;
  bool use_reentrant = true;  ///< false if recompute_save_ops is set
  /// Operators whose outputs recompute_modules keep: ["aten::mm"]; see RecomputeOptions.
  std::vector<std::string> recompute_save_ops;
  std::vector<std::string> offload_modules;                   ///< modules whose saved activations are offloaded
  int64_t min_offloaded_tensor_size = kMinOffloadedElements;  ///< in elements; smaller ones stay
  bool align_fsdp_param_groups = false;
  int expert_parallel_size = 1;
  /// Ranks over which an expert's parameters are sharded with expert parallelism; unset: from sharding_size.
  std::optional<int> expert_shard_size;
  bool reshard_local_experts = true;
  std::vector<std::string> moe_modules;  ///< patterns that must match all distributed experts
};

/// Handling of unknown keys and of patterns without matches: warning or error.
enum class Strictness { kWarn, kStrict };

/// Reads the file: keys of MindSpeed-MM's fsdp2_config.yaml, or fsdp_plan, recompute_plan and ep_plan of MindSpeed's
/// native route, at the top level or under parallel. Throws UsageError with file, line, key and value; unknown keys are
/// warnings unless strict. `log`: see key_log.h.
Fsdp2Config load_fsdp2_config(const std::string& path, Strictness strictness, const DiagnosticSink& sink,
                              std::vector<KeyNote>* log = nullptr);
/// As load_fsdp2_config, from text; `source` is used in messages.
Fsdp2Config parse_fsdp2_config(const std::string& text, const std::string& source, Strictness strictness,
                               const DiagnosticSink& sink, std::vector<KeyNote>* log = nullptr);

/// Name of a MindSpeed-MM key in the file that the configuration was read from: ROLL's strategy_config and MindSpeed's
/// native route use other names. "offload_to_cpu" -> "offload_policy"
std::string key_in_file(const Fsdp2Config& config, const std::string& key);

/// Shard group size for a data parallel world (including context parallel ranks). Throws UsageError if it does not
/// divide the world.
int shard_group_size(const Fsdp2Config& config, int world_size);

/// All MindSpeed-MM keys that are known, sorted.
std::vector<std::string> fsdp2_config_keys();

}  // namespace megashard
