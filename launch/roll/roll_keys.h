#pragma once

#include <span>
#include <string>
#include <vector>

#include "framework/arguments/yaml_value.h"
#include "launch/roll/roll_worker.h"

namespace megashard {

/// A key of a section of a ROLL configuration.
struct RollKey {
  const char* name;
  /// Null: known to ROLL, but not read.
  void (*take)(const YamlValue& value, RollWorker& worker, Arguments& arguments) = nullptr;
  bool roll_drops = false;     ///< ROLL reads it at another place and ignores it here
  const char* flag = nullptr;  ///< our flag that it sets
};

/// A key of an unsupported feature; values that do not request it are accepted.
struct MissingFunction {
  const char* section;
  const char* name;
  std::vector<std::string> harmless;
  const char* why;
};

std::span<const RollKey> roll_pipeline_keys();  ///< at the top level
std::span<const RollKey> roll_worker_keys();    ///< of a worker, without its sections
std::span<const RollKey> roll_model_keys();     ///< model_args
std::span<const RollKey> roll_training_keys();  ///< training_args
std::span<const RollKey> roll_strategy_keys();  ///< strategy_config, without wrap_policy
std::span<const RollKey> roll_wrap_keys();      ///< wrap_policy
/// Of the pipeline's loss, at the top level and of the worker.
std::span<const RollKey> roll_loss_keys(RollPipeline pipeline);
std::span<const RollKey> roll_loss_worker_keys(RollPipeline pipeline);
const std::vector<MissingFunction>& missing_functions();
/// Appends to a message about flags the keys of the file that set them.
std::string with_roll_keys(const std::string& message);

/// True if the file has workers, so that a role must be given.
bool is_roll_configuration(const YAML::Node& root);

}  // namespace megashard
