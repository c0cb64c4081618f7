#include "framework/modules/fsdp2_config.h"

#include <yaml-cpp/yaml.h>

#include <functional>
#include <map>
#include <utility>

#include "framework/arguments/yaml_value.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config_entries.h"

namespace megashard {

namespace {

using Entry = YamlValue;
using EntryReader = std::function<void(const Entry&, Fsdp2Config&)>;

const std::map<std::string, EntryReader>& readers() {
  static const std::map<std::string, EntryReader> table = {
      {"sharding_size", [](auto& entry, auto& config) { config.sharding_size = detail::read_sharding_size(entry); }},
      {"sub_modules_to_wrap",
       [](auto& entry, auto& config) { config.sub_modules_to_wrap = detail::read_patterns(entry); }},
      {"reshard_after_forward",
       [](auto& entry, auto& config) { config.reshard_after_forward = detail::read_reshard(entry); }},
      {"param_dtype", [](auto& entry, auto& config) { config.mixed_precision.param_dtype = entry.dtype(); }},
      {"reduce_dtype", [](auto& entry, auto& config) { config.mixed_precision.reduce_dtype = entry.dtype(); }},
      {"output_dtype", [](auto& entry, auto& config) { config.mixed_precision.output_dtype = entry.dtype(); }},
      {"cast_forward_inputs",
       [](auto& entry, auto& config) { config.mixed_precision.cast_forward_inputs = entry.boolean(); }},
      {"grad_dtype", [](auto& entry, auto& config) { config.mixed_precision.grad_dtype = entry.dtype(); }},
      {"buffer_dtype", [](auto& entry, auto& config) { config.mixed_precision.buffer_dtype = entry.dtype(); }},
      {"shard_placement",
       [](auto& entry, auto& config) { config.shard_placement = detail::read_shard_placement(entry); }},
      {"unused_parameters",
       [](auto& entry, auto& config) { config.unused_parameters = detail::read_unused_parameters(entry); }},
      {"fp8_all_gather", [](auto& entry, auto& config) { config.fp8_all_gather = detail::read_fp8_scale(entry); }},
      {"fp8_all_gather_modules",
       [](auto& entry, auto& config) { config.fp8_all_gather_modules = detail::read_patterns(entry); }},
      {"reduce_scatter_max_input_buffers",
       [](auto& entry, auto& config) { config.reduce_scatter_max_input_buffers = detail::read_int(entry, 1); }},
      {"separate_reduce_scatter_group",
       [](auto& entry, auto& config) { config.separate_reduce_scatter_group = entry.boolean(); }},
      {"communication_memory",
       [](auto& entry, auto& config) { config.communication_memory = detail::read_memory(entry); }},
      {"offload_to_cpu", [](auto& entry, auto& config) { config.offload_to_cpu = entry.boolean(); }},
      {"pin_memory", [](auto& entry, auto& config) { config.pin_memory = entry.boolean(); }},
      {"num_to_forward_prefetch",
       [](auto& entry, auto& config) { config.num_to_forward_prefetch = detail::read_int(entry, 0); }},
      {"num_to_backward_prefetch",
       [](auto& entry, auto& config) { config.num_to_backward_prefetch = detail::read_int(entry, 0); }},
      {"ignored_modules", [](auto& entry, auto& config) { config.ignored_modules = detail::read_patterns(entry); }},
      {"ignored_modules_replicated",
       [](auto& entry, auto& config) { config.ignored_modules_replicated = entry.boolean(); }},
      {"recompute_modules", [](auto& entry, auto& config) { config.recompute_modules = detail::read_patterns(entry); }},
      {"use_reentrant", [](auto& entry, auto& config) { config.use_reentrant = entry.boolean(); }},
      {"recompute_save_ops",
       [](auto& entry, auto& config) {
         config.recompute_save_ops = entry.list("a list of operators, as in [\"aten::mm\"]");
       }},
      {"offload_modules", [](auto& entry, auto& config) { config.offload_modules = detail::read_patterns(entry); }},
      {"min_offloaded_tensor_size",
       [](auto& entry, auto& config) { config.min_offloaded_tensor_size = entry.integer(0); }},
      {"align_fsdp_param_groups", [](auto& entry, auto& config) { config.align_fsdp_param_groups = entry.boolean(); }},
      {"expert_parallel_size",
       [](auto& entry, auto& config) { config.expert_parallel_size = detail::read_int(entry, 1); }},
      {"expert_fully_shard_parallel_size",
       [](auto& entry, auto& config) { config.expert_shard_size = detail::read_int(entry, 1); }},
      {"reshard_local_experts", [](auto& entry, auto& config) { config.reshard_local_experts = entry.boolean(); }},
      {"moe_modules", [](auto& entry, auto& config) { config.moe_modules = detail::read_patterns(entry); }},
  };
  return table;
}

void unknown_fsdp2_key(const Entry& entry, const YAML::Node& written, Strictness strictness, const DiagnosticSink& sink,
                       KeyLog* log) {
  const bool strict = strictness == Strictness::kStrict;
  const std::string message = unknown_key(yaml_place(entry.source, written), entry.key, fsdp2_config_keys(),
                                          strict ? "; remove it." : "; it is ignored.");
  if (strict) return take_key(log, entry, [&] { throw UsageError(message); });
  leave_key(log, entry, message.substr(yaml_place(entry.source, written).size()));
  sink(Severity::kWarning, message + (message.ends_with('?') ? " It is ignored." : ""));
}

/// Adds a remedy for `[model.layers.{*}]`, where YAML parses * as an alias.
YAML::Node load_patterns(const std::string& text, const std::string& source) {
  try {
    return load_yaml(text, source);
  } catch (const UsageError& error) {
    const std::string message = error.what();
    if (message.find("alias not found") == std::string::npos) throw;
    throw UsageError(message + " Patterns inside [ ] need quotes, as in [\"model.layers.{*}\"].");
  }
}

}  // namespace

std::vector<std::string> fsdp2_config_keys() {
  std::vector<std::string> keys;
  for (const auto& [key, reader] : readers()) keys.push_back(key);
  return keys;
}

Fsdp2Config parse_fsdp2_config(const std::string& text, const std::string& source, Strictness strictness,
                               const DiagnosticSink& sink, KeyLog* log) {
  const YAML::Node root = load_patterns(text, source);
  if (!root.IsMap() && !root.IsNull()) throw UsageError(source + ": the file must hold `key: value` lines.");
  if (detail::is_native_config(root)) return detail::parse_native_config(root, source, sink, log);
  Fsdp2Config config;
  Mistakes mistakes;
  bool reentrant_written = false;
  for (const auto& item : root) {
    const Entry entry{source, item.first.Scalar(), item.second};
    const auto reader = readers().find(entry.key);
    if (reader == readers().end()) {
      mistakes.attempt([&] { unknown_fsdp2_key(entry, item.first, strictness, sink, log); });
      continue;
    }
    if (entry.node.IsNull()) {
      take_key(log, entry, [] {});  // keeps the default
      continue;
    }
    mistakes.attempt([&] { take_key(log, entry, [&] { reader->second(entry, config); }); });
    if (entry.key == "use_reentrant") reentrant_written = true;
  }
  mistakes.throw_if_any();
  if (!config.recompute_save_ops.empty()) {
    if (config.use_reentrant && reentrant_written) {
      throw UsageError(source + ": recompute_save_ops needs use_reentrant: false; change it, or leave it out.");
    }
    config.use_reentrant = false;
  }
  return config;
}

Fsdp2Config load_fsdp2_config(const std::string& path, Strictness strictness, const DiagnosticSink& sink, KeyLog* log) {
  return parse_fsdp2_config(read_configuration(path, "--fsdp2-config-path"), path, strictness, sink, log);
}

std::string key_in_file(const Fsdp2Config& config, const std::string& key) {
  using Names = std::map<std::string, std::string>;
  static const Names roll = {{"sharding_size", "fsdp_size"},
                             {"offload_to_cpu", "offload_policy"},
                             {"num_to_forward_prefetch", "forward_prefetch"},
                             {"expert_parallel_size", "ep_size"},
                             {"expert_fully_shard_parallel_size", "efsdp_size"}};
  static const Names native = {{"sharding_size", "fully_shard_parallel_size"},
                               {"offload_to_cpu", "cpu_offload"},
                               {"sub_modules_to_wrap", "fsdp_plan.apply_modules"},
                               {"recompute_modules", "recompute_plan.apply_modules"},
                               {"moe_modules", "ep_plan.apply_modules"}};
  static const Names none;
  const Names& names = config.wrap_policy ? roll : config.native_patterns ? native : none;
  const auto found = names.find(key);
  return found == names.end() ? key : found->second;
}

int shard_group_size(const Fsdp2Config& config, int world_size) {
  if (!config.sharding_size) return world_size;
  const int ranks = *config.sharding_size;
  if (world_size % ranks != 0) {
    const std::string key = key_in_file(config, "sharding_size");
    throw UsageError("World size " + std::to_string(world_size) + " must be divisible by " + key + " " +
                     std::to_string(ranks) + "; change " + key + " in the FSDP2 file (auto: all ranks) or the " +
                     "number of ranks.");
  }
  return ranks;
}

}  // namespace megashard
