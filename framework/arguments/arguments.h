#pragma once

#include <map>
#include <set>
#include <string>

#include "framework/arguments/activation_arguments.h"
#include "framework/arguments/checkpoint_arguments.h"
#include "framework/arguments/context_parallel_arguments.h"
#include "framework/arguments/data_arguments.h"
#include "framework/arguments/expert_arguments.h"
#include "framework/arguments/logging_arguments.h"
#include "framework/arguments/model_arguments.h"
#include "framework/arguments/network_arguments.h"
#include "framework/arguments/optimizer_arguments.h"
#include "framework/arguments/parallel_arguments.h"
#include "framework/arguments/training_arguments.h"

namespace megashard {

/// All options of a training run as plain fields, with Megatron's Namespace names and defaults. The headers of the
/// parts declare their rows and rules; see argument_table.h for a row's content. (derived): computed by
/// validate_arguments. Unset optionals were not given.
struct Arguments : NetworkArguments,
                   ExpertArguments,
                   InitializationArguments,
                   RegularizationArguments,
                   PrecisionArguments,
                   TrainingArguments,
                   ActivationArguments,
                   OptimizerArguments,
                   LearningRateArguments,
                   ValidationArguments,
                   LoggingArguments,
                   DistributedArguments,
                   ContextParallelArguments,
                   CheckpointArguments,
                   ModelSourceArguments,
                   DataArguments,
                   TokenizerArguments {
  std::map<std::string, std::string> given;    ///< options that the user set, and where: "num_layers", "run.yaml:12"
  std::set<std::string> given_without_effect;  ///< accepted flags without effect here
  std::set<std::string> unread_sections;       ///< sections of the YAML file besides gpt_args

  bool is_given(const std::string& name) const { return given.count(name) != 0; }
};

}  // namespace megashard
