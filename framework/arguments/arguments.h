#pragma once

#include <set>
#include <string>

#include "framework/arguments/model_arguments.h"
#include "framework/arguments/run_arguments.h"
#include "framework/arguments/training_arguments.h"

namespace megashard {

/// All options of a training run as plain fields, named as in Megatron's Namespace, with Megatron's
/// defaults. framework/arguments/argument_table.h says how each is spelt on the command line and in
/// YAML; validate_arguments derives and checks.
struct Arguments : NetworkArguments,
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
                   CheckpointArguments,
                   ModelSourceArguments,
                   DataArguments,
                   TokenizerArguments {
  std::set<std::string> given;                 ///< names that the user set: "num_layers"
  std::set<std::string> given_without_effect;  ///< flags that were accepted but change nothing here
  std::set<std::string> unread_sections;       ///< of the YAML file, beside gpt_args

  bool is_given(const std::string& name) const { return given.count(name) != 0; }
};

}  // namespace megashard
