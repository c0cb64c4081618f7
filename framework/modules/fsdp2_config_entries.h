#pragma once

#include <optional>
#include <string>
#include <vector>

#include "framework/arguments/key_log.h"
#include "framework/arguments/yaml_value.h"
#include "framework/modules/fsdp2_config.h"

namespace megashard::detail {

// Readers for values of FSDP2 files.

int read_int(const YamlValue& value, int smallest);
std::vector<std::string> read_patterns(const YamlValue& value);
std::optional<int> read_sharding_size(const YamlValue& value);
ReshardAfterForward read_reshard(const YamlValue& value);
ShardDimRule read_shard_placement(const YamlValue& value);
UnusedParameters read_unused_parameters(const YamlValue& value);
std::optional<Float8Scale> read_fp8_scale(const YamlValue& value);  ///< unset for false
GroupMemory read_memory(const YamlValue& value);

/// True for files of MindSpeed's native route: fsdp_plan and recompute_plan, at the top level or under parallel.
bool is_native_config(const YAML::Node& root);
/// Reports keys without effect here to `sink`.
Fsdp2Config parse_native_config(const YAML::Node& root, const std::string& source, const DiagnosticSink& sink,
                                KeyLog* log);

}  // namespace megashard::detail
