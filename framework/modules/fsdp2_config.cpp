#include "framework/modules/fsdp2_config.h"

#include <yaml-cpp/yaml.h>

#include <functional>
#include <map>
#include <utility>

#include "framework/arguments/configuration_file.h"
#include "framework/arguments/nearest_name.h"
#include "framework/arguments/yaml_text.h"
#include "framework/mistakes.h"
#include "framework/modules/fsdp2_config_entry.h"

namespace megashard {

namespace {

using Entry = detail::ConfigEntry;
using Reader = std::function<void(const Entry&, Fsdp2Config&)>;

const std::map<std::string, Reader>& readers() {
  static const std::map<std::string, Reader> table = {
      {"sharding_size", [](auto& entry, auto& config) { config.sharding_size = entry.sharding_size(); }},
      {"sub_modules_to_wrap", [](auto& entry, auto& config) { config.sub_modules_to_wrap = entry.patterns(); }},
      {"reshard_after_forward", [](auto& entry, auto& config) { config.reshard_after_forward = entry.reshard(); }},
      {"param_dtype", [](auto& entry, auto& config) { config.mixed_precision.param_dtype = entry.dtype(); }},
      {"reduce_dtype", [](auto& entry, auto& config) { config.mixed_precision.reduce_dtype = entry.dtype(); }},
      {"output_dtype", [](auto& entry, auto& config) { config.mixed_precision.output_dtype = entry.dtype(); }},
      {"cast_forward_inputs",
       [](auto& entry, auto& config) { config.mixed_precision.cast_forward_inputs = entry.boolean(); }},
      {"offload_to_cpu", [](auto& entry, auto& config) { config.offload_to_cpu = entry.boolean(); }},
      {"pin_memory", [](auto& entry, auto& config) { config.pin_memory = entry.boolean(); }},
      {"num_to_forward_prefetch", [](auto& entry, auto& config) { config.num_to_forward_prefetch = entry.integer(0); }},
      {"num_to_backward_prefetch",
       [](auto& entry, auto& config) { config.num_to_backward_prefetch = entry.integer(0); }},
      {"ignored_modules", [](auto& entry, auto& config) { config.ignored_modules = entry.patterns(); }},
      {"ignored_modules_replicated",
       [](auto& entry, auto& config) { config.ignored_modules_replicated = entry.boolean(); }},
      {"recompute_modules", [](auto& entry, auto& config) { config.recompute_modules = entry.patterns(); }},
      {"use_reentrant", [](auto& entry, auto& config) { config.use_reentrant = entry.boolean(); }},
      {"recompute_save_ops",
       [](auto& entry, auto& config) {
         config.recompute_save_ops = entry.words("a list of operators, as in [\"aten::mm\"]");
       }},
      {"offload_modules", [](auto& entry, auto& config) { config.offload_modules = entry.patterns(); }},
      {"min_offloaded_tensor_size",
       [](auto& entry, auto& config) { config.min_offloaded_tensor_size = entry.integer(0); }},
      {"align_fsdp_param_groups", [](auto& entry, auto& config) { config.align_fsdp_param_groups = entry.boolean(); }},
      {"expert_parallel_size", [](auto& entry, auto& config) { config.expert_parallel_size = entry.integer(1); }},
      {"expert_fully_shard_parallel_size",
       [](auto& entry, auto& config) { config.expert_shard_size = entry.integer(1); }},
      {"reshard_local_experts", [](auto& entry, auto& config) { config.reshard_local_experts = entry.boolean(); }},
      {"moe_modules", [](auto& entry, auto& config) { config.moe_modules = entry.patterns(); }},
  };
  return table;
}

void unknown_key(const Entry& entry, int line, Strictness strictness, const DiagnosticSink& sink) {
  const std::string sentence = entry.source + ":" + std::to_string(line) + ": unknown key \"" + entry.key + "\"" +
                               did_you_mean(entry.key, fsdp2_config_keys());
  if (strictness == Strictness::kStrict) throw UsageError(sentence + (sentence.ends_with('?') ? "" : "."));
  sink(Severity::kWarning, sentence + (sentence.ends_with('?') ? " It is ignored." : "; it is ignored."));
}

/// With a remedy for `[model.layers.{*}]`, where * begins an alias.
YAML::Node load_patterns(const std::string& text, const std::string& source) {
  try {
    return load_yaml(text, source);
  } catch (const UsageError& error) {
    const std::string sentence = error.what();
    if (sentence.find("alias not found") == std::string::npos) throw;
    throw UsageError(sentence + " Patterns inside [ ] need quotes, as in [\"model.layers.{*}\"].");
  }
}

}  // namespace

std::vector<std::string> fsdp2_config_keys() {
  std::vector<std::string> keys;
  for (const auto& [key, reader] : readers()) keys.push_back(key);
  return keys;
}

std::optional<at::ScalarType> dtype_from_name(const std::string& name) {
  static const std::map<std::string, at::ScalarType> names = {
      {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp32", at::kFloat}, {"fp64", at::kDouble},
      {"int8", at::kChar}, {"int16", at::kShort},   {"int32", at::kInt},  {"int64", at::kLong}};
  const auto found = names.find(name);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

Fsdp2Config parse_fsdp2_config(const std::string& text, const std::string& source, Strictness strictness,
                               const DiagnosticSink& sink) {
  const YAML::Node root = load_patterns(text, source);
  if (!root.IsMap() && !root.IsNull()) throw UsageError(source + ": the file must hold `key: value` lines.");
  if (detail::is_native_config(root)) return detail::parse_native_config(root, source, sink);
  Fsdp2Config config;
  Mistakes mistakes;
  bool reentrant_written = false;
  for (const auto& item : root) {
    const Entry entry{source, item.first.Scalar(), item.second};
    const int line = item.first.Mark().line + 1;
    const auto reader = readers().find(entry.key);
    if (reader == readers().end()) {
      mistakes.attempt([&] { unknown_key(entry, line, strictness, sink); });
      continue;
    }
    if (entry.value.IsNull()) continue;  // null: the default
    mistakes.attempt([&] { reader->second(entry, config); });
    if (entry.key == "use_reentrant") reentrant_written = true;
  }
  mistakes.tell();
  if (!config.recompute_save_ops.empty()) {
    if (config.use_reentrant && reentrant_written) {
      throw UsageError(source + ": recompute_save_ops needs use_reentrant: false; change it, or leave it out.");
    }
    config.use_reentrant = false;
  }
  return config;
}

Fsdp2Config load_fsdp2_config(const std::string& path, Strictness strictness, const DiagnosticSink& sink) {
  return parse_fsdp2_config(read_configuration(path, "--fsdp2-config-path"), path, strictness, sink);
}

int shard_group_size(const Fsdp2Config& config, int world_size) {
  if (!config.sharding_size) return world_size;
  const int ranks = *config.sharding_size;
  if (world_size % ranks != 0) {
    throw UsageError("World size " + std::to_string(world_size) + " must be divisible by sharding_size " +
                     std::to_string(ranks) + "; change sharding_size in the FSDP2 file (auto: all ranks) or the " +
                     "number of ranks.");
  }
  return ranks;
}

}  // namespace megashard
