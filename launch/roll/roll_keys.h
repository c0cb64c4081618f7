#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "framework/arguments/yaml_value.h"
#include "launch/roll/roll_worker.h"

namespace megashard {

/// A key of one section of a ROLL configuration.
struct RollKey {
  const char* name;
  /// Null: known to ROLL, and nothing here reads it.
  void (*take)(const YamlValue& value, RollWorker& worker, Arguments& arguments) = nullptr;
  bool roll_drops = false;     ///< ROLL itself reads it at another place, and takes no notice of it here
  const char* flag = nullptr;  ///< of ours that it sets
};

/// A key whose function is missing here; values that do not ask for it are let through.
struct MissingFunction {
  const char* section;
  const char* name;
  std::vector<std::string> harmless;
  const char* why;
};

std::span<const RollKey> roll_pipeline_keys();  ///< at the top of the file
std::span<const RollKey> roll_worker_keys();    ///< of a worker, but its sections
std::span<const RollKey> roll_model_keys();     ///< model_args
std::span<const RollKey> roll_training_keys();  ///< training_args
std::span<const RollKey> roll_strategy_keys();  ///< strategy_config, but wrap_policy
std::span<const RollKey> roll_wrap_keys();      ///< wrap_policy
const std::vector<MissingFunction>& missing_functions();
/// A message about flags, with the keys of the file that set them behind it.
std::string with_roll_keys(const std::string& message);

/// Whether the file has workers, so that a role must be named.
bool is_roll_configuration(const YAML::Node& root);
/// The workers of a file, and the strategy of each.
std::vector<std::pair<std::string, std::string>> roll_roles(const YAML::Node& root);
/// Whether workers of that strategy are run here.
bool is_roll_strategy(const std::string& name);

}  // namespace megashard
