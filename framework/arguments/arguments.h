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

/// All options of a training run as plain fields, named as in Megatron's Namespace, with Megatron's
/// defaults. The files of the parts hold their rows and rules; argument_table.h says what a row knows. (derived):
/// filled by validate_arguments. An unset optional was not given.
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
  std::map<std::string, std::string> given;    ///< names that the user set, and where: "num_layers", "run.yaml:12"
  std::set<std::string> given_without_effect;  ///< flags that were accepted but change nothing here
  std::set<std::string> unread_sections;       ///< of the YAML file, beside gpt_args

  bool is_given(const std::string& name) const { return given.count(name) != 0; }
};

}  // namespace megashard
