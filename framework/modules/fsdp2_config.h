#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/activation_arguments.h"
#include "framework/diagnostics.h"
#include "parallel/copies/float8_quantise.h"
#include "parallel/fsdp/fully_shard.h"

namespace megashard {

struct KeyNote;

/// Groups by class instead of by path (wrap_policy of ROLL's strategy_config). Embeddings whose
/// weight nothing else holds are always groups of their own.
struct WrapPolicy {
  /// Class names of layers; unset: the model's own choice. Of nested matches the inner ones count.
  std::optional<std::vector<std::string>> layer_classes;
  bool embeddings = false;  ///< asked for: a tied embedding, which stays in the root, is told
  bool lm_output = false;   ///< lm_head or output_layer, unless tied
  /// Classes of experts ("Qwen3MoeMLP"), or of what holds all of a block ("Qwen3MoeExperts"), which
  /// are groups inside their layers.
  std::vector<std::string> expert_classes{};
};

/// Along which dimension parameters are cut: 0 where it says nothing.
struct ShardDimRule {
  bool divisible = false;  ///< the first dimension that the ranks divide, if there is one (ROLL)
  /// By patterns of modules, for all their parameters that have the dimension; of several matches the last.
  std::vector<std::pair<std::string, int64_t>> dims{};
};

/// The file of --fsdp2-config-path (MindSpeed-MM's Fsdp2Config), with its defaults. The lists hold
/// path patterns; see framework/modules/module_patterns.h.
struct Fsdp2Config {
  std::optional<int> sharding_size;  ///< ranks that share one copy; unset ("auto" or null): all
                                     ///< data parallel ranks
  std::optional<std::vector<std::string>> sub_modules_to_wrap;  ///< unset: the model's own choice
  std::optional<WrapPolicy> wrap_policy;                        ///< set: instead of the patterns
  bool native_patterns = false;                                 ///< as MindSpeed's native route writes them; fsdp_plan
  ReshardAfterForward reshard_after_forward;
  MixedPrecisionPolicy mixed_precision;  ///< all its fields are keys
  ShardDimRule shard_placement;
  UnusedParameters unused_parameters = UnusedParameters::kZeroFill;
  std::optional<Float8Scale> fp8_all_gather;        ///< set: matrices are gathered as float8_e4m3fn
  std::vector<std::string> fp8_all_gather_modules;  ///< empty: all but embeddings and output layers
  int reduce_scatter_max_input_buffers = 1;         ///< in flight at a time
  std::optional<GroupMemory> communication_memory;  ///< of the buffers; unset: the allocator's
  bool offload_to_cpu = false;
  bool pin_memory = true;  ///< only with offload_to_cpu
  int num_to_forward_prefetch = 0;
  int num_to_backward_prefetch = 0;
  std::vector<std::string> ignored_modules;
  bool ignored_modules_replicated = false;  ///< their gradients are reduced over the ranks
  std::vector<std::string> recompute_modules;
  bool use_reentrant = true;  ///< false with recompute_save_ops
  /// Operators whose outputs recompute_modules keep: ["aten::mm"]; see RecomputeOptions.
  std::vector<std::string> recompute_save_ops;
  std::vector<std::string> offload_modules;                   ///< whose saved activations wait in host memory
  int64_t min_offloaded_tensor_size = kMinOffloadedElements;  ///< elements; smaller ones stay
  bool align_fsdp_param_groups = false;
  int expert_parallel_size = 1;
  /// Ranks that share an expert's rows, with expert parallelism; unset: follows sharding_size.
  std::optional<int> expert_shard_size;
  bool reshard_local_experts = true;
  std::vector<std::string> moe_modules;  ///< the experts that are spread, which must be all
};

/// Whether an unknown key, or a pattern that matches nothing, is an error.
enum class Strictness { kWarn, kStrict };

/// Reads the file: keys of MindSpeed-MM's fsdp2_config.yaml, or fsdp_plan, recompute_plan and
/// ep_plan of MindSpeed's native route, at the top or under parallel. Throws UsageError naming
/// file, line, key and value; unknown keys are told to `sink` unless strict. `log`: see key_log.h.
Fsdp2Config load_fsdp2_config(const std::string& path, Strictness strictness, const DiagnosticSink& sink,
                              std::vector<KeyNote>* log = nullptr);
/// The same from text; `source` stands in messages.
Fsdp2Config parse_fsdp2_config(const std::string& text, const std::string& source, Strictness strictness,
                               const DiagnosticSink& sink, std::vector<KeyNote>* log = nullptr);

/// What a key of MindSpeed-MM's form is called in the file that the configuration was read from: ROLL's strategy_config
/// and MindSpeed's native route have names of their own. "offload_to_cpu" -> "offload_policy"
std::string key_in_file(const Fsdp2Config& config, const std::string& key);

/// Ranks of one shard group for a data parallel world (context parallel ranks included). Throws
/// UsageError when they do not divide the world.
int shard_group_size(const Fsdp2Config& config, int world_size);

/// The keys of MindSpeed-MM's form that are known, sorted.
std::vector<std::string> fsdp2_config_keys();

}  // namespace megashard
