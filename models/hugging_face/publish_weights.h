#pragma once

#include <memory>

#include "framework/arguments/arguments.h"
#include "framework/modules/megatron_module.h"
#include "framework/training/listener.h"
#include "parallel/collectives/process_group.h"

namespace megashard {

/// Implements --publish-weights: the weights before the first step, and after each step of --publish-interval, as
/// PublishedSteps in bf16, with the files beside the weights of --hf-model, so that the folder is a model's, too; with
/// adapters these alone, as PEFT loads them. A thread copies and writes them while the next step computes; the
/// optimizer waits for the copy. Collective. `world`: all ranks.
std::shared_ptr<Listener> publish_weights(MegatronModule& model, const Arguments& arguments,
                                          const ProcessGroupPtr& world);

}  // namespace megashard
